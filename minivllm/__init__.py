"""minivllm: the engine that the book builds, one idea at a time.

Names are fetched when they are first used (PEP 562), so importing one module loads no other.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.llm import LLM as LLM
    from minivllm.params import BeamSearchParams as BeamSearchParams
    from minivllm.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "minivllm.llm",
    "SamplingParams": "minivllm.params",
    "BeamSearchParams": "minivllm.params",
}
__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
