"""Above the chapters: measuring and showing what the engine does.

Pictures come from here by name, and are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.lab.draw import draw_film_strip as draw_film_strip
    from minivllm.lab.draw import draw_memory_map as draw_memory_map
    from minivllm.lab.draw import draw_memory_maps as draw_memory_maps
    from minivllm.lab.draw_steps import draw_timeline as draw_timeline
    from minivllm.lab.draw_steps import draw_utilisation as draw_utilisation
    from minivllm.lab.record import Recorder as Recorder

_HOME = {
    "draw_film_strip": "minivllm.lab.draw",
    "draw_memory_map": "minivllm.lab.draw",
    "draw_memory_maps": "minivllm.lab.draw",
    "draw_timeline": "minivllm.lab.draw_steps",
    "draw_utilisation": "minivllm.lab.draw_steps",
    "Recorder": "minivllm.lab.record",
}
__all__ = [
    "Recorder",
    "draw_film_strip",
    "draw_memory_map",
    "draw_memory_maps",
    "draw_timeline",
    "draw_utilisation",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minivllm.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
