"""Chapter 0: put weights into a decoder: each tensor in its place, none missing, none left over.

Tensors arrive as (name, tensor) pairs from a file or from a seed. Names are those of Hugging Face
checkpoints, without the leading "model.".
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minivllm.errors import WeightMismatch
from minivllm.model.decoder import Decoder

_SHOWN = 5


def load_weights(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give the decoder these weights, cast to its dtype and moved to its device.

    Raises WeightMismatch naming every tensor that is missing, extra, double or misshapen; the decoder
    is then as it was.
    """
    expected = decoder.state_dict()
    found: dict[str, Tensor] = {}
    seen: set[str] = set()
    faults: list[str] = []
    for full_name, tensor in tensors:
        name = full_name.removeprefix("model.")
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old checkpoints carry it; it follows from the config
        shown = full_name if full_name.isprintable() else ascii(full_name)
        if name not in expected:
            faults.append(f"extra: {shown} {list(tensor.shape)}")
        elif name in seen:
            faults.append(f"double: {shown}")
        elif tensor.shape != expected[name].shape:
            faults.append(
                f"misshapen: {shown} is {list(tensor.shape)}, expected {list(expected[name].shape)}"
            )
        elif not tensor.is_floating_point():
            faults.append(f"not floating-point: {shown} is {tensor.dtype}")
        else:
            found[name] = tensor.to(device=decoder.device, dtype=decoder.dtype)
        seen.add(name)
    if decoder.config.tie_word_embeddings and "lm_head.weight" not in seen:
        seen.add("lm_head.weight")
        if "embed_tokens.weight" in found:
            found["lm_head.weight"] = found["embed_tokens.weight"]
    faults += [f"missing: {name} {list(t.shape)}" for name, t in expected.items() if name not in seen]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise WeightMismatch(
            f"The weights do not fit the {decoder.config.model_type} model that the config describes: "
            f"{'; '.join(faults[:_SHOWN])}{more}. Take weights and config from the same checkpoint."
        )
    decoder.load_state_dict(found, assign=True)
    decoder.requires_grad_(False).eval()


def random_weights(decoder: Decoder, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Weights from a seed: each tensor from its own generator, so one does not depend on the others.

    Drawn in float32 on the decoder's device; the same seed gives the same weights on the same kind of
    device. The scale keeps activations near 1 and attention sharp, so that a token that
    attention should see, or should not, changes the logits.
    """
    for name, meta in decoder.state_dict().items():
        if name == "lm_head.weight" and decoder.config.tie_word_embeddings:
            continue
        own_seed = zlib.crc32(f"{seed} {name}".encode())  # PyTorch's CPU generator looks at 32 bits only
        generator = torch.Generator(decoder.device).manual_seed(own_seed)
        noise = torch.randn(meta.shape, generator=generator, device=decoder.device)
        if name.endswith("norm.weight"):
            yield name, 1 + noise / 8
        elif name.endswith("bias"):
            yield name, noise / 8
        else:
            yield name, noise * (2 / meta.shape[-1] ** 0.5)
