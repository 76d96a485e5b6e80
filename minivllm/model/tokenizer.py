"""Chapter 0: text to token ids and back. All that the project asks of a tokenizer goes through here.

Tokenizers come from the transformers library. Building one out of a GGUF file takes it several
seconds, so the result is kept in the cache folder, under the digest of the file's header, with the digest of
each file that is kept. What is kept is read by the tokenizers library, which does the work inside of
transformers' own: to import that takes seconds again, and only chat templates need it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from minivllm.errors import InvalidModelFile, InvalidOption, InvalidPrompt, MinivllmError
from minivllm.model.hub import ModelSource, cache_home, resolve

logger = logging.getLogger(__name__)

KEPT = "kept.json"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's own beginning-of-sequence token where it has one."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        ...


class ByteTokenizer:
    """A token is a byte: for models with random weights, which have no tokenizer of their own."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(_as_text(text).encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes read as UTF-8; ids above 255, and bytes that are no text, show as a replacement character."""
        return bytes([min(i, 255) for i in token_ids]).decode("utf-8", errors="replace")  # no text has a 255

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """One line a message, as `role: content`."""
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")


class TransformersTokenizer:
    """A tokenizer of the transformers library."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        with _tokenizer_faults("This model's tokenizer cannot encode this text"):
            return self._tokenizer.encode(_as_text(text), add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, spaces as the model wrote them."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own format. Raises InvalidOption where it has none."""
        if not self._tokenizer.chat_template:
            raise InvalidOption("This model has no chat template; give it a plain prompt.")
        with _tokenizer_faults("This model's chat template cannot be applied"):
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        return self.encode(text, add_special_tokens=False)  # the template has written them already


class KeptTokenizer:
    """The tokenizer.json that a tokenizer of the transformers library has saved, without that library.

    transformers: makes the tokenizer that saved it; it knows the chat template. Raises InvalidModelFile.
    """

    def __init__(self, origin: Path, folder: Path, transformers: Callable[[], Any]):
        from tokenizers import Tokenizer as Reader

        with _tokenizer_faults(f"{origin} has no tokenizer that can be read"):
            self._tokenizer = Reader.from_file(str(folder / "tokenizer.json"))
        self._transformers = transformers

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        with _tokenizer_faults("This model's tokenizer cannot encode this text"):
            return self._tokenizer.encode(_as_text(text), add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, spaces as the model wrote them."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own format. Raises InvalidOption where it has none."""
        return self._whole.apply_chat_template(messages)

    @cached_property
    def _whole(self) -> TransformersTokenizer:
        return TransformersTokenizer(self._transformers())


def load_tokenizer(model: str | PathLike[str] | ModelSource) -> Tokenizer:
    """The tokenizer of a model. Raises ModelNotFound and InvalidModelFile."""
    source = model if isinstance(model, ModelSource) else resolve(model)
    if source.kind == "random":
        return ByteTokenizer()
    path = Path(str(source.path))
    if source.kind == "gguf":
        return _from_gguf(path, source.gguf.header_digest)
    return TransformersTokenizer(_from_pretrained(path, path))


def _from_gguf(path: Path, digest: str) -> Tokenizer:
    kept = cache_home() / "tokenizers" / f"{digest[:32]}-transformers-{version('transformers')}"
    if kept.is_dir():
        try:
            if json.loads((kept / KEPT).read_text()) != _digests(kept):
                raise InvalidModelFile(f"{kept} is not as it was kept")
            return KeptTokenizer(path, kept, lambda: _from_pretrained(path, kept))
        except (InvalidModelFile, OSError, ValueError):
            logger.warning("The tokenizer kept in %s is damaged; it is made again.", kept)
            shutil.rmtree(kept, ignore_errors=True)
    tokenizer = _from_pretrained(path, path.parent, gguf_file=path.name)
    _keep(tokenizer.save_pretrained, kept)
    return TransformersTokenizer(tokenizer)


def _from_pretrained(origin: Path, folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    with _tokenizer_faults(f"{origin} has no tokenizer that transformers can read"):
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )


@contextmanager
def _tokenizer_faults(what: str) -> Iterator[None]:
    """Turn whatever a tokenizer from a file raises into our own error: it may be of almost any type, and
    a panic in the tokenizers library is not even an Exception."""
    try:
        yield
    except MinivllmError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        raise InvalidModelFile(
            f"{what} ({type(error).__name__}: {error}). Take a checkpoint that comes with its tokenizer."
        ) from error


def _keep(save: Callable[[str], object], folder: Path) -> None:
    """Save into folder in one step, so that no other process sees half of it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            whole = Path(scratch, folder.name)
            save(str(whole))
            (whole / KEPT).write_text(json.dumps(_digests(whole)))
            os.rename(whole, folder)
    except OSError as error:  # no room, no right to write, or another process was first
        logger.info("The tokenizer is not kept in %s: %s", folder, error)


def _digests(folder: Path) -> dict[str, str]:
    """The digest of each file of a tokenizer that is kept."""
    files = (path for path in folder.iterdir() if path.name != KEPT)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _as_text(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidPrompt(f"A prompt must be text, not {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(f"The prompt is no whole text: {error.reason} at place {error.start}.") from error
    return text
