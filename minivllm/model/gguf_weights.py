"""Chapter 0: a model out of a GGUF file: its shape, and its tensors under Hugging Face names.

One trap is worth knowing. In a GGUF file of the Llama family the rows of the query and key projections
are permuted, because llama.cpp turns neighbouring numbers of a head (0, 1), (2, 3), ... where this
decoder turns (0, d/2), (1, d/2 + 1), ... The rows are put back here. Forgotten, the model still speaks
fluently for a few words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from minivllm.errors import InvalidModel
from minivllm.model.config import FAMILIES, ModelConfig, RopeConfig
from minivllm.model.gguf_file import GGUFFile

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The shape that a GGUF file states. Raises InvalidModel for what the decoder does not have."""
    settings = file.metadata
    family = settings.get("general.architecture")
    if family not in FAMILIES:
        raise InvalidModel(
            f"{file.path} holds a model of type {family!r}. This decoder runs {', '.join(FAMILIES)}."
        )

    def setting(key: str, default: int | float | None = None) -> int | float:
        value = settings.get(f"{family}.{key}", default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidModel(f"{file.path}: the setting {family}.{key} is {value!r}; a number is needed.")
        return value

    def size(key: str, default: int | None = None) -> int:
        value = setting(key, default)
        if not isinstance(value, int):
            raise InvalidModel(
                f"{file.path}: the setting {family}.{key} is {value!r}; a whole number is needed."
            )
        return value

    unsupported_settings = (
        "expert_count",
        "attention.sliding_window",
        "attention.scale",
        "logit_scale",
        "embedding_scale",
        "residual_scale",
    )
    for unsupported in unsupported_settings:
        if settings.get(f"{family}.{unsupported}"):
            raise InvalidModel(f"{file.path} uses {family}.{unsupported}, which this decoder does not have.")
    if "token_embd.weight" not in file.tensors:
        raise InvalidModel(f"{file.path} has no tensor 'token_embd.weight'; it is not a whole model.")
    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(key, head_dim) != head_dim:
            raise InvalidModel(
                f"{file.path}: {family}.{key} is {size(key)}, unlike the head_dim of {head_dim}."
            )
    eos = (settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return ModelConfig(
        model_type=family,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=size("context_length"),
        rms_norm_eps=float(setting("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, family, setting("rope.freq_base", 10_000.0), size("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=family == "qwen3",
        eos_token_ids=tuple(sorted({i for i in eos if isinstance(i, int)})),
    )


def gguf_tensors(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, float32 tensor) pairs; a name that has no counterpart is passed on as it is.

    Unpacked a few at a time, on every core: numpy lets go of the interpreter while it works.
    """

    def read(name: str) -> tuple[str, Tensor]:
        array = file.dequantize(name)
        if config.model_type == "llama" and ".attn_q." in name:
            array = _unpermute(array, config.num_attention_heads)
        if config.model_type == "llama" and ".attn_k." in name:
            array = _unpermute(array, config.num_key_value_heads)
        return hugging_face_name(name), torch.from_numpy(np.require(array, requirements=["C", "W"]))

    names = [name for name in file.tensors if name != _ROPE_FACTORS]
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        for i in range(0, len(names), 2 * workers):
            yield from pool.map(read, names[i : i + 2 * workers])


def hugging_face_name(name: str) -> str:
    """The decoder's name for a GGUF tensor: `blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, module, kind] if module in _LAYER_NAMES:
            return f"layers.{layer}.{_LAYER_NAMES[module]}.{kind}"
        case [module, kind] if module in _OTHER_NAMES:
            return f"{_OTHER_NAMES[module]}.{kind}"
    return name


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Neighbouring pairs -> halves, within each head; rows [num_heads * head_dim, ...]."""
    if rows.shape[0] % (2 * num_heads):
        return rows  # misshapen: the loader will say so by name
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rope(file: GGUFFile, family: str, theta: float, context_length: int) -> RopeConfig:
    prefix = f"{family}.rope.scaling."
    known = {prefix + name for name in ("type", "factor", "original_context_length", "finetuned")}
    for key in file.metadata.keys() - known:
        if key.startswith(prefix) or key == f"{family}.rope.scale_linear":
            raise InvalidModel(f"{file.path} sets {key}, which this decoder does not have.")
    kind = file.metadata.get(prefix + "type", "linear" if prefix + "factor" in file.metadata else "none")
    if kind not in ("none", "linear", "yarn"):
        raise InvalidModel(
            f"{file.path}: {prefix}type is {kind!r}; this decoder has 'none', 'linear' and 'yarn'."
        )
    factors = file.dequantize(_ROPE_FACTORS) if _ROPE_FACTORS in file.tensors else None
    return RopeConfig(
        rope_theta=theta,
        rope_type="default" if kind == "none" else kind,
        factor=file.metadata.get(prefix + "factor", 1.0),
        original_max_position_embeddings=file.metadata.get(
            prefix + "original_context_length", context_length
        ),
        freq_factors=None if factors is None else tuple(factors.ravel().tolist()),
    )
