"""Chapter 0: the parts of a decoder layer: RMSNorm, attention with grouped heads, SwiGLU.

Module and parameter names are those of Hugging Face checkpoints, so that a weight finds its place by
its name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig
from minivllm.model.rope import apply_rotary


class Linear(nn.Linear):
    """PyTorch's, without its random start: on the meta device, drawing one imports PyTorch's compiler."""

    def reset_parameters(self) -> None:
        """The weights come from a file or a seed."""


class Embedding(nn.Embedding):
    """PyTorch's, without the random start."""

    def reset_parameters(self) -> None:
        """The weights come from a file or a seed."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019, arXiv 1910.07467).

    Computed in at least float32: the mean of squares of a half-precision row loses too much.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Project to queries, keys and values, turn them by position, attend through the store, project back."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)
        norm = config.qk_norm
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if norm else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: Batch, store: KVStore) -> Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        heads = (x.shape[0], -1, self.head_dim)
        q = apply_rotary(self.q_norm(self.q_proj(x).view(heads)), *rotary)
        k = apply_rotary(self.k_norm(self.k_proj(x).view(heads)), *rotary)
        v = self.v_proj(x).view(heads)
        out = store.attend(self.layer, q, k, v, batch)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
