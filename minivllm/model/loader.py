"""Chapter 0: from the name of a model to a decoder with its weights in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import InvalidOption
from minivllm.model.config import ModelConfig
from minivllm.model.decoder import Decoder
from minivllm.model.hub import ModelSource, resolve
from minivllm.model.presets import PRESETS
from minivllm.model.weights import load_weights, random_weights

DTYPES = ("float32", "float64", "bfloat16", "float16")


def load_model(
    model: str | PathLike[str] | ModelSource, *, dtype: str = "auto", device: str = "auto", seed: int = 0
) -> Decoder:
    """The decoder of a model: "smollm2-135m", a hub id, a folder, a .gguf file, or "random:<preset>".

    dtype: "float32", "float64", "bfloat16", "float16"; "auto" is the checkpoint's own, but
    float32 on a CPU that has no instructions for bfloat16. device: "cpu", "cuda", "cuda:1"; "auto" is CUDA
    where there is one. seed: for "random:<preset>" alone.

    Raises ModelNotFound, InvalidModel (of which InvalidModelFile and WeightMismatch are kinds) and
    InvalidOption.
    """
    torch_device = resolve_device(device)
    check_dtype(dtype)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**31:
        raise InvalidOption(f"seed={seed!r} is not possible: it must be a whole number from 0 to 2**31 - 1.")
    source = model if isinstance(model, ModelSource) else resolve(model)
    config, read = _open(source, seed)
    decoder = Decoder(config, resolve_dtype(dtype, config, torch_device), torch_device)
    load_weights(decoder, read(decoder))
    return decoder


def _open(
    source: ModelSource, seed: int
) -> tuple[ModelConfig, Callable[[Decoder], Iterable[tuple[str, Tensor]]]]:
    """The shape of a model, and a function that reads its weights."""
    if source.kind == "random":
        return PRESETS[str(source.preset)], lambda decoder: random_weights(decoder, seed)
    path = Path(str(source.path))
    if source.kind == "gguf":
        from minivllm.model.gguf_weights import gguf_config, gguf_tensors  # here: 0.2 s to import

        config = gguf_config(source.gguf)
        return config, lambda decoder: gguf_tensors(source.gguf, config)
    from minivllm.model.safetensors_weights import safetensors_tensors

    return folder_config(path), lambda decoder: safetensors_tensors(path)


def folder_config(folder: Path) -> ModelConfig:
    """The shape in a Hugging Face folder's config.json, with the stop tokens of generation_config.json."""
    from minivllm.model.safetensors_weights import read_json

    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return ModelConfig.from_hf(read_json(folder / "config.json"), eos)


def check_dtype(dtype: str) -> None:
    """Raises InvalidOption for anything but "auto" and the names in DTYPES."""
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidOption(f"dtype={dtype!r} is not possible: it must be one of auto, {', '.join(DTYPES)}.")


def resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in. Most CPUs only imitate 16-bit numbers, slowly, so "auto" avoids them there."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if config.dtype not in DTYPES:
        return torch.float32
    if device.type == "cpu" and not (config.dtype == "bfloat16" and multiplies_bfloat16()):
        return torch.float32
    return getattr(torch, config.dtype)


def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products of bfloat16: AVX-512 bf16 or AMX."""
    return bool(_processor().get("avx512_bf16")) or has_matrix_tiles()


def has_matrix_tiles() -> bool:
    """Whether this machine's CPU multiplies tiles of bfloat16 (AMX)."""
    return bool(_processor().get("amx_bf16"))


def _processor() -> Mapping[str, Any]:
    """What PyTorch knows of this CPU."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def resolve_device(device: str) -> torch.device:
    """The device to run on. Raises InvalidOption for one that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidOption(
            f"device={device!r} is not possible: it must be auto, cpu, cuda or cuda:N."
        ) from None
    if found.type not in ("cpu", "cuda"):
        raise InvalidOption(f"device={device!r} is not possible: it must be auto, cpu, cuda or cuda:N.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InvalidOption(
            f"device={device!r} is not here: PyTorch sees {torch.cuda.device_count()} CUDA devices."
        )
    return found
