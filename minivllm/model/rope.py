"""Chapter 0: rotary position embedding (RoPE), and the ways to stretch it to a longer context.

A head's numbers are taken in pairs, and each pair is turned by an angle that grows with the position:
fast for the first pair, slow for the last. The dot product of a turned query with a turned key then
depends on their distance alone (Su et al., 2021, arXiv 2104.09864). Number i is paired with number
i + head_dim / 2, as in Hugging Face checkpoints; a GGUF Llama file pairs neighbours, and
`model/gguf_weights.py` puts its rows in order.

A key is stored turned. So the angles of a position must never change later: the stretching types here
fix them once, from the config alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minivllm.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position for each pair, float32 [head_dim / 2], and a factor on cos and sin.

    In float32, as in training and in every other implementation: computed more exactly, the angles
    would be less true to the model.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    period = rope.rope_theta**exponents  # positions per radian
    if rope.freq_factors is not None:
        period = period * torch.tensor(rope.freq_factors, dtype=torch.float32)
    inv_freq = 1.0 / period
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(period, rope, head_dim), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def rotary_table(
    positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each [num_tokens, 1, head_dim / 2] in dtype; positions is [num_tokens]."""
    angles = positions[:, None].float() * inv_freq
    return (angles.cos() * factor).to(dtype)[:, None], (angles.sin() * factor).to(dtype)[:, None]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of numbers of x [num_tokens, num_heads, head_dim] by its angle; x stays as it is.

    Pair i is (x[..., i], x[..., i + head_dim / 2]); the cosine and sine of its angle at each token are in
    cos and sin [num_tokens, 1, head_dim / 2]. A pair (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between are blended."""
    assert rope.original_max_position_embeddings is not None
    wavelength = 2 * math.pi / inv_freq
    turns = rope.original_max_position_embeddings / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    slowed = torch.where(turns < rope.low_freq_factor, inv_freq / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, inv_freq, slowed)


def _yarn(period: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023, arXiv 2309.00071): as llama3, but blended along the pair's index."""
    context = rope.original_max_position_embeddings
    assert context is not None

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (rope.factor * period) * (1 - kept) + 1.0 / period * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
