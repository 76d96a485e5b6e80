"""Chapter 8: the decoder for a CPU: its weights in the order in which the processor reads them.

A matrix product reads a weight in small panels that fit the registers. PyTorch's `linear` brings the weight
into that order at every call; here it is done once:

    plain                          row 0, row 1, row 2, ...
    packed, here panels of 8 rows  column 0 of rows 0-7, column 1 of rows 0-7, ...   one stream, front to back

What comes right after a product is done while its result is still in a register or the nearest cache: silu,
the product of gate and up, the sum with what a layer began with. And products of the same rows are joined:
queries, keys and values come from one. A layer has 5 calls where the plain one has 7, and silu, products and
sums need no pass of their own.

Two libraries can do this, and `products_for` chooses. `kernels/c_linear.c` is ours. oneDNN, which PyTorch
brings along, knows more processors, and needs no compiler. Its operations are those that `torch.compile` puts
into its CPU code; PyTorch does not promise them to callers, so `can_pack` tries them before they are used.
Where there is neither, the plain decoder runs. It also stays the oracle.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.errors import InvalidOption
from minivllm.kernels.c_linear import Panels
from minivllm.kernels.c_rows import RowKernels
from minivllm.memory.store import KVStore
from minivllm.model import loader
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder, DecoderLayer
from minivllm.model.layers import RMSNorm
from minivllm.model.rope import apply_rotary, rotary_table

PACKABLE = (torch.float32, torch.bfloat16)


class Products(Protocol):
    """A way to keep a weight and to multiply rows with it."""

    def pack(self, weight: Tensor) -> Tensor:
        """weight [out_features, in_features] in an order of its own."""

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        """The weight [out_features, in_features] that was packed, a copy."""

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        out_features: int,
        then: str,
        other: Tensor | None,
    ) -> Tensor:
        """x [rows, in] -> [rows, out]; then "swish": silu of it; "add", "mul": with `other`, of its shape."""


class OneDNN:
    """Weights and products as oneDNN has them."""

    def pack(self, weight: Tensor) -> Tensor:
        """weight [out_features, in_features] in an order of oneDNN's own."""
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        """The weight [out_features, in_features] that was packed, a copy."""
        return packed.to_dense()

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        out_features: int,
        then: str,
        other: Tensor | None,
    ) -> Tensor:
        """As `Products` says."""
        if other is None:
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, then, [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, then)


def products_for(dtype: torch.dtype, device: torch.device) -> Products | None:
    """What multiplies packed weights of this dtype here, best with few rows; None where none can be packed.

    Our own where they can be compiled; but oneDNN in bfloat16 where the processor multiplies it by
    instructions that our code does not use: the tiles of AMX, or any, where the compiler does not know them.
    """
    if device.type != "cpu" or dtype not in PACKABLE:
        return None
    try:
        panels = Panels()
    except InvalidOption:
        return OneDNN() if can_pack(dtype, device) else None
    lacks = loader.has_matrix_tiles() or (loader.multiplies_bfloat16() and not panels.multiplies_bfloat16)
    return OneDNN() if dtype == torch.bfloat16 and lacks and can_pack(dtype, device) else panels


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can pack weights of this dtype here: it multiplies it, and has the operations."""
    if device.type != "cpu" or dtype not in PACKABLE or not torch.backends.mkldnn.is_available():
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x, plain = torch.ones(2, 3, dtype=dtype), nn.Linear(3, 4, dtype=dtype)
        linear = PackedLinear(plain)
        linear(x, "swish"), linear(x, "mul", linear(x)), linear.weight()
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True


class PackedLinear:
    """Linear layers over the same input as one: [weight 0; weight 1; ...] packed, biases joined.

    sizes: the rows of each. Raises ValueError where only some have a bias.
    """

    def __init__(self, *linears: nn.Linear, products: Products | None = None):
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if biases and len(biases) < len(linears):
            raise ValueError("Linear layers are packed together only if all or none have a bias.")
        weights = [linear.weight.detach() for linear in linears]
        self.sizes = [linear.out_features for linear in linears]
        self.out_features, self.in_features = sum(self.sizes), linears[0].in_features
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        self.products = products or OneDNN()
        self._weight = self.products.pack(torch.cat(weights) if len(weights) > 1 else weights[0])

    def __call__(self, x: Tensor, then: str = "none", other: Tensor | None = None) -> Tensor:
        """x [rows, in] -> [rows, out]; then "swish": silu of it; "add", "mul": with `other`, of its shape."""
        assert x.shape[1] == self.in_features
        return self.products.linear(x, self._weight, self.bias, self.out_features, then, other)

    def weight(self) -> Tensor:
        """The weight [out, in] in its plain order, a copy."""
        return self.products.unpack(self._weight, self.out_features, self.in_features)


class PackedRows(nn.Module):
    """Stands for a linear layer whose rows are now in a packed one: the same numbers, and no second copy."""

    def __init__(self, packed: PackedLinear, number: int):
        super().__init__()
        self.packed, self.number = packed, number

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], unpacked at each call."""
        return self.packed.weight().split(self.packed.sizes)[self.number]

    @property
    def bias(self) -> Tensor | None:
        """[out_features], where there is one."""
        bias = self.packed.bias
        return None if bias is None else bias.split(self.packed.sizes)[self.number]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """What a linear layer would put there, unpacked: PyTorch asks each module of a `state_dict`."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]; all rows of the packed layer are computed."""
        return self.packed(x).split(self.packed.sizes, dim=-1)[self.number]


def pack(
    parent: nn.Module, *names: str, products: Products | None = None, keep: bool = False
) -> PackedLinear:
    """Pack the linear layers of these names; what is packed already stays. keep: whether the layers stay as
    they are, beside the packed copy of their weights; otherwise these are let go."""
    linears = [getattr(parent, name) for name in names]
    if isinstance(linears[0], PackedRows):
        return linears[0].packed
    packed = PackedLinear(*linears, products=products)
    for number, name in enumerate(names if not keep else ()):
        setattr(parent, name, PackedRows(packed, number))
    return packed


def give_back_freed_memory() -> None:
    """Packing frees each plain weight; the C library keeps such pieces for what comes next. Where it can hand
    them back to the system (glibc), it does."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class PlainRows:
    """The norm and the rotary embedding in PyTorch, under the names that `kernels/c_rows.py` has for them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size] -> x / rms(x) * weight."""
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def apply_rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [num_tokens, num_heads, head_dim], turned."""
        return apply_rotary(x, cos, sin)


class PackedLayer:
    """A decoder layer whose products are packed: the same numbers as `DecoderLayer`, up to rounding."""

    def __init__(self, layer: nn.Module, rows: PlainRows | RowKernels, **options: Any):
        assert isinstance(layer, DecoderLayer)
        self.plain, self.rows = layer, rows
        self.qkv = pack(layer.self_attn, "q_proj", "k_proj", "v_proj", **options)
        self.out = pack(layer.self_attn, "o_proj", **options)
        self.gate = pack(layer.mlp, "gate_proj", **options)
        self.up = pack(layer.mlp, "up_proj", **options)
        self.down = pack(layer.mlp, "down_proj", **options)

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: Batch, store: KVStore) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        attention = self.plain.self_attn
        qkv = self.qkv(self.norm(self.plain.input_layernorm, x)).split(self.qkv.sizes, dim=-1)
        q, k, v = (part.view(len(x), -1, attention.head_dim) for part in qkv)
        if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
            q, k = self.norm(attention.q_norm, q), self.norm(attention.k_norm, k)
        q, k = self.rows.apply_rotary(q, *rotary), self.rows.apply_rotary(k, *rotary)
        x = self.out(store.attend(attention.layer, q, k, v, batch).flatten(1), "add", x)
        normed = self.norm(self.plain.post_attention_layernorm, x)
        return self.down(self.up(normed, "mul", self.gate(normed, "swish")), "add", x)

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.rows.rms_norm(x, norm.weight, norm.eps)


class PackedDecoder:
    """A decoder with its weights packed, called like the decoder.

    keep: whether the decoder stays as it is, and weights are there twice; what is loaded into it later does
    not reach the packed ones. Otherwise its linear layers are replaced by what reads the packed ones: it
    still computes and gives its `state_dict`, but cannot be copied, moved or loaded again. Then weights are
    there once; only an embedding that is also the output layer is in memory in both orders.
    """

    def __init__(
        self,
        model: Decoder,
        rows: PlainRows | RowKernels | None = None,
        products: Products | None = None,
        keep: bool = False,
    ):
        self.model, self.rows = model, rows or PlainRows()
        options: dict[str, Any] = {"products": products, "keep": keep}
        with torch.inference_mode():
            self.layers = [PackedLayer(layer, self.rows, **options) for layer in model.layers]
            self.lm_head = pack(model, "lm_head", **options)
        if not keep:
            give_back_freed_memory()

    def __call__(self, batch: Batch, store: KVStore) -> Tensor:
        """Logits [len(batch.logits_indices), vocab_size], as `Decoder.forward` gives them."""
        model = self.model
        x = model.embed_tokens(batch.token_ids)
        rotary = rotary_table(batch.positions, model.inv_freq, model.rotary_factor, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, batch, store)
        return self.lm_head(self.rows.rms_norm(x[batch.logits_indices], model.norm.weight, model.norm.eps))
