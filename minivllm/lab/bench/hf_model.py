"""Above the chapters: the same weights as this engine's, for engines that take Hugging Face's classes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import InvalidModel, InvalidOption
from minivllm.model.hub import ModelSource, cache_home

if TYPE_CHECKING:
    import torch


def load_hf_model(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of the transformers library that never stops at an end-of-sequence token.

    Raises InvalidOption for random weights, which that library cannot make the same, and InvalidModel.
    """
    from transformers import GenerationConfig

    model = _from_pretrained(source, dtype).to(device).eval()
    # generate() takes from here what a call leaves open, the checkpoint's stop tokens and sampling among it.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def hf_folder(source: ModelSource) -> Path:
    """A plain Hugging Face folder with this model: its own, or a GGUF file's weights in float32, made once.

    Raises InvalidOption for random weights, and InvalidModel.
    """
    if source.kind == "folder":
        return Path(str(source.path))
    _refuse_random(source)
    path = Path(str(source.path))
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_home() / "hf" / f"{path.stem}-{digest[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            whole = Path(scratch, folder.name)
            _convert(source, whole)
            try:
                os.rename(whole, folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same files
                    raise
    return folder


def _convert(source: ModelSource, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    path = Path(str(source.path))
    packed = _from_pretrained(source, torch.float32)
    fields = packed.config.to_dict()
    fields.pop("quantization_config", None)  # the weights are plain now
    plain = type(packed)(type(packed.config)(**fields)).to(torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    tokenizer.save_pretrained(str(folder))


def _from_pretrained(source: ModelSource, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    _refuse_random(source)
    path = Path(str(source.path))
    folder, gguf = (path.parent, {"gguf_file": path.name}) if source.kind == "gguf" else (path, {})
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            **gguf,
        )
    except ImportError as error:  # GGUF files need gguf and accelerate
        raise InvalidOption(
            f"The transformers library cannot load {path} here ({error}). "
            "`pip install gguf accelerate` brings what it needs for a GGUF file."
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidModel(
            f"The transformers library cannot load {path} ({type(error).__name__}: {error}). "
            "Take a checkpoint that it knows."
        ) from error


def _refuse_random(source: ModelSource) -> None:
    if source.kind == "random":
        raise InvalidOption(
            f"model={source.name!r} is not possible with this engine: its weights come from a seed, and only "
            "the engine 'minivllm' makes them. Take smollm2-135m, a hub id, a folder or a .gguf file."
        )
