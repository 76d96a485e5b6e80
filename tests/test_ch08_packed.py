"""Chapter 8: the packed decoder against the plain one, and its parts against PyTorch's."""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import replace

import psutil
import pytest
import torch
from torch import nn

from minivllm.kernels import c_build
from minivllm.kernels.c_rows import RowKernels
from minivllm.memory.store import RecomputeStore
from minivllm.model import packed
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.layers import RMSNorm
from minivllm.model.loader import load_model
from minivllm.model.packed import PackedDecoder, PackedLinear, PackedRows, PlainRows, can_pack, pack
from minivllm.model.presets import PRESETS
from minivllm.model.rope import apply_rotary
from minivllm.model.weights import load_weights, random_weights

CPU = torch.device("cpu")
COMPILER = os.environ.get("CC") or next(filter(shutil.which, c_build.COMPILERS), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
pytestmark = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="oneDNN is not there")
PRESET_NAMES = pytest.mark.parametrize("preset", sorted(p for p in PRESETS if p.startswith("tiny")))
ROWS = pytest.mark.parametrize("rows", [PlainRows, pytest.param(RowKernels, marks=needs_compiler)])


def random_model(preset: str, **changes) -> Decoder:
    decoder = Decoder(replace(PRESETS[preset], **changes))
    load_weights(decoder, random_weights(decoder, seed=3))
    return decoder


def some_batch(vocab_size: int) -> Batch:
    """Whole prompts of 1, 7 and 40 tokens."""
    tokens = [[(11 * i + 7 * j + 1) % vocab_size for i in range(n)] for j, n in enumerate((1, 7, 40))]
    return Batch.pack([(seq_id, ids, 0) for seq_id, ids in enumerate(tokens)])


@ROWS
@PRESET_NAMES
def test_the_packed_decoder_gives_the_plain_ones_logits(preset, rows):
    model = random_model(preset)
    batch = some_batch(model.config.vocab_size)
    with torch.inference_mode():
        plain = model(batch, RecomputeStore())
        fast = PackedDecoder(model, rows())
        torch.testing.assert_close(fast(batch, RecomputeStore()), plain, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model(batch, RecomputeStore()), plain, atol=1e-5, rtol=1e-4)
        again = PackedDecoder(model, rows())
        assert torch.equal(again(batch, RecomputeStore()), fast(batch, RecomputeStore()))
        assert again.layers[0].qkv is fast.layers[0].qkv  # packed once


@PRESET_NAMES
def test_weights_are_there_once_and_can_still_be_read(preset):
    model = random_model(preset)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    PackedDecoder(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    left = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    assert left == {"embed_tokens.weight"}
    projection = model.get_submodule("layers.0.self_attn.k_proj")
    assert isinstance(projection, PackedRows)
    assert torch.equal(projection.weight, before["layers.0.self_attn.k_proj.weight"])
    bias = before.get("layers.0.self_attn.k_proj.bias")
    if bias is None:
        assert projection.bias is None
    else:
        assert projection.bias is not None
        assert torch.equal(projection.bias, bias)


@pytest.mark.parametrize("sizes", [(5,), (3, 1, 7), (64, 16, 16)])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_a_packed_linear_is_the_layers_side_by_side(num_rows, bias, sizes):
    torch.manual_seed(sum(sizes))
    layers = [nn.Linear(19, size, bias=bias) for size in sizes]
    x, other = torch.randn(num_rows, 19), torch.randn(num_rows, sum(sizes))
    with torch.inference_mode():
        linear, expected = PackedLinear(*layers), torch.cat([layer(x) for layer in layers], dim=-1)
        torch.testing.assert_close(linear(x), expected)
        torch.testing.assert_close(linear(x, "swish"), nn.functional.silu(expected))
        torch.testing.assert_close(linear(x, "add", other), expected + other)
        torch.testing.assert_close(linear(x, "mul", other), expected * other)


@PRESET_NAMES
def test_a_decoder_that_is_kept_stays_as_it_is(preset):
    model = random_model(preset)
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    batch = some_batch(model.config.vocab_size)
    with torch.inference_mode():
        plain = model(batch, RecomputeStore())
        fast = PackedDecoder(model, keep=True)
        torch.testing.assert_close(fast(batch, RecomputeStore()), plain, atol=1e-5, rtol=1e-4)
        assert torch.equal(model(batch, RecomputeStore()), plain)
    assert {name: (id(module), type(module)) for name, module in model.named_modules()} == before
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses


def test_freed_pieces_go_back_to_the_system():
    """Pieces too small for pages of their own, each second one kept, so that what is free lies between."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    process = psutil.Process()
    pieces = [torch.ones(10_000) for _ in range(4_000)]  # 160 MB
    full = process.memory_info().rss
    del pieces[::2]
    packed.give_back_freed_memory()
    assert full - process.memory_info().rss > 40e6


@pytest.mark.parametrize("keep", [False, True])
def test_they_go_back_once_a_decoder_is_packed_and_lets_go_of_its_weights(monkeypatch, keep):
    calls = []
    monkeypatch.setattr(packed, "give_back_freed_memory", lambda: calls.append(1))
    model = Decoder(PRESETS["tiny-llama"])
    load_weights(model, random_weights(model, seed=3))
    PackedDecoder(model, keep=keep)
    assert len(calls) == (0 if keep else 1)


def test_a_system_without_such_a_call_is_left_alone(monkeypatch):
    def refuse(name: None) -> None:
        raise TypeError("no library of that name")

    monkeypatch.setattr(packed.ctypes, "CDLL", refuse)
    packed.give_back_freed_memory()


def test_layers_of_which_only_some_have_a_bias_are_not_joined():
    with pytest.raises(ValueError, match="all or none"):
        PackedLinear(nn.Linear(3, 4), nn.Linear(3, 4, bias=False))


def test_one_name_after_another_is_packed_once():
    parent = nn.Module()
    parent.one, parent.two = nn.Linear(4, 3), nn.Linear(4, 5)
    first = pack(parent, "one", "two")
    assert pack(parent, "one", "two") is first
    assert (parent.one.weight.shape, parent.two.weight.shape) == ((3, 4), (5, 4))


def test_what_cannot_be_packed_is_known(monkeypatch):
    assert not can_pack(torch.float64, CPU)
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))

    def missing(*args):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(packed.PackedLinear, "__call__", missing)
    assert not can_pack(torch.float32, CPU)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 576), (3, 9), (200, 576), (5, 3, 64), (2, 2, 1)], ids=str)
def test_the_norm_in_c(shape, dtype):
    torch.manual_seed(sum(shape))
    x = (3 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype)[..., : shape[-1]]  # strides of its own
    norm = RMSNorm(shape[-1], 1e-5)
    norm.weight = nn.Parameter(torch.randn(shape[-1]).to(dtype), requires_grad=False)
    got = RowKernels().rms_norm(x, norm.weight, norm.eps)
    torch.testing.assert_close(got, norm(x), atol=1e-6, rtol=2e-6 if dtype == torch.float32 else 8e-3)
    assert torch.equal(
        RowKernels().rms_norm(torch.zeros_like(x), norm.weight, 1e-5), torch.zeros(shape).to(dtype)
    )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 14), (200, 9, 64)], ids=str)
def test_the_rotary_embedding_in_c_turns_its_rows_and_no_others(shape, dtype):
    torch.manual_seed(sum(shape))
    tokens, heads, size = shape
    wide = torch.randn(tokens, heads + 2, size).to(dtype)
    before, rows = wide.clone(), wide[:, 1 : heads + 1]
    angles = torch.randn(tokens, 1, size // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary(rows, cos, sin)
    assert RowKernels().apply_rotary(rows, cos, sin) is rows
    exact = dtype == torch.float32
    torch.testing.assert_close(rows, expected, atol=1e-6 if exact else 3e-2, rtol=1e-6 if exact else 2e-2)
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, -1], before[:, -1])


@needs_compiler
def test_nan_and_infinity_stay_visible_in_bfloat16():
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]], dtype=torch.bfloat16)
    got = RowKernels().rms_norm(x, torch.ones(2, dtype=torch.bfloat16), 1e-5)
    assert got[0].isnan().all()
    assert got[1, 0].isnan()


def test_a_loaded_model_is_the_same_packed_in_tokens(smollm2_source):
    """The real model: both give the greedy next token of a text's every position."""
    model = load_model(smollm2_source, dtype="float32", device="cpu")
    ids = [504, 3575, 282, 4649, 314, 7042, 30, 657, 314, 260, 1704, 282, 260, 1157]
    batch = replace(Batch.pack([(0, ids, 0)]), logits_indices=torch.arange(len(ids)))
    with torch.inference_mode():
        plain = model(batch, RecomputeStore())
        fast = PackedDecoder(model)(batch, RecomputeStore())
    torch.testing.assert_close(fast, plain, atol=5e-3, rtol=1e-3)
    assert torch.equal(fast.argmax(-1), plain.argmax(-1))
