"""Chapter 0: a checkpoint from the Hugging Face hub, through the library of that name.

Only safetensors, JSON and tokenizer files are asked for. Weights in pickle files stay where they are.
"""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path
from typing import Any

from minivllm.errors import ModelNotFound
from minivllm.model.download import Progress

logger = logging.getLogger(__name__)

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",  # not "*": some repositories hold the same weights again under other names
    "model*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WHY_NO_PICKLES = "Weights in pickle files (.bin, .pt) are never loaded, because unpickling can run any code"
LOG_IN = "set HF_TOKEN or run `hf auth login`"


def from_hub(name: str, repo: str, file: str | None, revision: str | None, progress: Progress | None) -> Path:
    """The folder of a repository's checkpoint, or its one .gguf file; what is missing is downloaded.

    Without a network the library falls back to a complete cached snapshot. Raises ModelNotFound.
    """
    import huggingface_hub

    try:
        # For a single file too: hf_hub_download retries for 23 s without a network, this gives up at once.
        folder = Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[file] if file else list(HUB_FILES),
                tqdm_class=_reporting_bar(name, progress),
            )
        )
    except Exception as error:  # the library's own, its HTTP client's and the disk's: no common class
        reason = _hub_reason(error, repo, revision)
        raise ModelNotFound(
            f"{name!r} is not on this disk, and not to be had from the hub: {reason}"
        ) from error
    if file and (folder / file).is_file():
        return folder / file
    if not file and (folder / "config.json").is_file() and any(folder.glob("model.safetensors*")):
        return folder
    raise ModelNotFound(f"The repository {repo} {_what_is_missing(repo, file, revision)}")


def _hub_reason(error: Exception, repo: str, revision: str | None) -> str:
    from huggingface_hub import errors

    first_line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated. Accept its terms on its page on the hub, then {LOG_IN}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {repo}. Check the spelling; if it is private, {LOG_IN}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}. Give a branch, tag or full commit hash after '@'."
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is not a hub id: {first_line}."
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"the hub cannot be reached, and the cache has not all of its files ({first_line}). Connect, "
            "unset HF_HUB_OFFLINE if it is set, or copy the model's folder here and give its path. "
            "The default model needs no hub."
        )
    return f"{type(error).__name__}: {first_line}. Try again, or download the files and give their path."


def _what_is_missing(repo: str, file: str | None, revision: str | None) -> str:
    import huggingface_hub

    try:
        files = huggingface_hub.list_repo_files(repo, revision=revision)
    except Exception:  # it only makes the message better; the reason itself is known
        logger.debug("The files of %s could not be listed.", repo, exc_info=True)
        files = []
    ggufs = sorted(each for each in files if each.endswith(".gguf"))
    if file:
        return f"has no file {file}. Its .gguf files: {', '.join(ggufs) or 'none that could be listed'}."
    has_safetensors = any(each.endswith(".safetensors") for each in files)
    if ggufs and not has_safetensors:
        return f"has its weights as .gguf files. Name one of them: '{repo}/{ggufs[0]}'."
    if any(each.endswith(PICKLES) for each in files) and not has_safetensors:
        return f"has no safetensors. {WHY_NO_PICKLES}. Choose a repository that has safetensors."
    return "is no checkpoint that can be loaded: config.json and model.safetensors, or its index, are needed."


def _reporting_bar(name: str, progress: Progress | None) -> type:
    """A progress bar for huggingface_hub that draws nothing and tells `progress` about the bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    lock, most = threading.Lock(), 0

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            initialise: Any = super().__init__  # the library's has no types
            initialise(*args, **{**kwargs, "file": io.StringIO(), "disable": progress is None})

        def update(self, n: float | None = 1) -> Any:
            nonlocal most
            drawn = super().update(n)
            if progress is not None and self.unit == "B":
                with lock:  # one bar counts bytes received, another bytes written: the furthest is told
                    most = max(most, int(self.n))
                    progress(f"Downloading {name}", most, int(self.total) if self.total else None)
            return drawn

    return ReportingBar
