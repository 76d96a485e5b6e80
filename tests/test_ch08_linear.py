"""Chapter 8: products in C, with weights in panels, against the same in float64, and how they are chosen."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import InvalidOption
from minivllm.kernels import c_build, c_linear
from minivllm.kernels.c_linear import Panels
from minivllm.memory.store import RecomputeStore
from minivllm.model import loader, packed
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.packed import OneDNN, PackedDecoder, products_for
from minivllm.model.presets import PRESETS
from minivllm.model.weights import load_weights, random_weights

CPU = torch.device("cpu")
NAN = float("nan")
COMPILER = os.environ.get("CC") or next(filter(shutil.which, c_build.COMPILERS), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
THEN = {
    "none": lambda y, other: y,
    "swish": lambda y, other: F.silu(y),
    "add": lambda y, other: y + other,
    "mul": lambda y, other: y * other,
}
# rows, in_features, out_features: around tiles (6 rows), panels (16 or 32), depths (256) and parts (240)
SIZES = [
    (1, 1, 1), (2, 3, 15), (5, 256, 16), (6, 257, 17), (7, 255, 33), (11, 600, 31), (13, 64, 160),
    (239, 20, 48), (240, 7, 40), (241, 512, 5), (487, 130, 65),
]  # fmt: skip


@pytest.fixture(params=[None, 16], ids=["as this CPU", "16 lanes"])
def panels(request, tmp_path_factory, monkeypatch) -> Panels:
    """As they are here, and as where vectors have 512 bits, which the compiler makes of shorter ones."""
    if request.param:
        monkeypatch.setenv("CC", f"{COMPILER} -DLANES={request.param} -w")
        folder = tmp_path_factory.getbasetemp() / f"lanes-{request.param}"
        monkeypatch.setattr(c_linear, "library", lambda: c_build.load(folder))
    made = Panels()
    assert request.param is None or made.size == 32
    return made


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(got: Tensor, expected: Tensor, in_features: int, scale: float = 1.0) -> None:
    """Within the rounding of float32 sums, `scale` times, and of the result's own dtype."""
    atol = scale * 1e-6 * (8 + in_features) ** 0.5 if got.dtype == torch.float32 else 1e-2
    rtol = 1e-5 if got.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=rtol)


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_product_is_what_float64_says(panels, size, dtype):
    rows, in_features, out_features = size
    weight = numbers(out_features, in_features, dtype=dtype)
    x, other = (
        numbers(rows, in_features, dtype=dtype, seed=1),
        numbers(rows, out_features, dtype=dtype, seed=2),
    )
    kept = panels.pack(weight)
    assert torch.equal(panels.unpack(kept, out_features), weight)
    for bias in (None, numbers(out_features, dtype=dtype, seed=3)):
        y = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        for then, apply in THEN.items():
            given = other if then in ("add", "mul") else None
            got = panels.linear(x, kept, bias, out_features, then, given)
            assert (got.dtype, got.shape) == (dtype, (rows, out_features))
            scale = float(other.abs().max()) if then == "mul" else 1.0
            close(got, apply(y, other.double()), in_features, scale)


@DTYPES
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(panels, dtype):
    """Bit for bit: what is summed, and in which order, is the same in tiles of one row and of six."""
    weight, x = numbers(70, 300, dtype=dtype), numbers(250, 300, dtype=dtype, seed=1)
    kept = panels.pack(weight)
    together = panels.linear(x, kept, None, 70, "swish", None)
    for first, end in ((0, 1), (3, 5), (7, 10), (100, 104), (240, 245), (1, 250)):
        assert torch.equal(panels.linear(x[first:end], kept, None, 70, "swish", None), together[first:end])
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(panels.linear(x, kept, None, 70, "swish", None), together)
    finally:
        torch.set_num_threads(threads)


@DTYPES
def test_only_what_belongs_to_it_is_read_and_written(panels, dtype):
    """Rows cut out of wider ones, with NaN around; and the rows of the last panel that stand for nothing."""
    weight = numbers(19, 33, dtype=dtype)
    x, other = numbers(8, 33, dtype=dtype, seed=1), numbers(8, 19, dtype=dtype, seed=2)
    wide_x, wide_other = (torch.full((10, 60), NAN, dtype=dtype) for _ in range(2))
    wide_x[1:9, 5:38], wide_other[1:9, 7:26] = x, other
    kept = panels.pack(weight)
    kept.view(-1, 33, panels.size)[-1, :, 19 % panels.size :] = NAN
    got = panels.linear(wide_x[1:9, 5:38], kept, None, 19, "mul", wide_other[1:9, 7:26])
    close(got, (x.double() @ weight.double().T) * other.double(), 33, float(other.abs().max()))
    assert panels.linear(x[:0], kept, None, 19, "none", None).shape == (0, 19)


def test_silu_at_its_ends(panels):
    x = torch.tensor([[0.0], [-0.0], [88.0], [-88.0], [-104.0], [1e30], [-1e30], [float("inf")], [NAN]])
    got = panels.linear(x, panels.pack(torch.ones(1, 1)), None, 1, "swish", None)
    torch.testing.assert_close(got, F.silu(x), equal_nan=True, atol=1e-30, rtol=1e-5)


@DTYPES
@pytest.mark.parametrize("preset", sorted(p for p in PRESETS if p.startswith("tiny")))
def test_a_decoder_in_panels_gives_the_plain_ones_logits(preset, dtype):
    model = Decoder(PRESETS[preset]).to(torch.float32)
    load_weights(model, random_weights(model, seed=3))
    model = model.to(dtype)
    ids = [
        [(11 * i + 7 * j + 1) % model.config.vocab_size for i in range(n)] for j, n in enumerate((1, 7, 40))
    ]
    batch = Batch.pack([(seq_id, tokens, 0) for seq_id, tokens in enumerate(ids)])
    batch = replace(batch, logits_indices=torch.arange(48))
    with torch.inference_mode():
        plain = model(batch, RecomputeStore())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fast = PackedDecoder(model, products=Panels())(batch, RecomputeStore())
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        if dtype == torch.float32:
            torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-4)
            return
        wide = Decoder(PRESETS[preset])
        load_weights(wide, {name: tensor.float() for name, tensor in before.items()}.items())
        exact = wide(batch, RecomputeStore())
    off, plainly_off = ((logits.float() - exact).square().mean().sqrt() for logits in (fast, plain))
    assert 0 < off < 1.3 * plainly_off, "in bfloat16, no further from float32 than the plain decoder"


def test_products_are_ours_where_they_can_be_compiled_and_onednns_elsewhere(monkeypatch):
    assert isinstance(products_for(torch.float32, CPU), Panels)
    assert isinstance(products_for(torch.bfloat16, CPU), Panels)
    assert products_for(torch.float16, CPU) is products_for(torch.float64, CPU) is None
    assert products_for(torch.float32, torch.device("meta")) is None
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(packed, "can_pack", lambda dtype, device: True)
    assert isinstance(products_for(torch.bfloat16, CPU), OneDNN), (
        "oneDNN has the processor's own instructions"
    )
    assert isinstance(products_for(torch.float32, CPU), Panels)

    def missing() -> None:
        raise InvalidOption("attention='c' is not possible: there is no C compiler.")

    monkeypatch.setattr(c_linear, "library", missing)
    assert isinstance(products_for(torch.float32, CPU), OneDNN)
    monkeypatch.setattr(packed, "can_pack", lambda dtype, device: False)
    assert products_for(torch.float32, CPU) is None
