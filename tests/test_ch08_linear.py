"""Chapter 8: products in C, with weights in panels, against the same in float64, and how they are chosen."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from guard_pages import guarded
from torch import Tensor, nn

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
MULTIPLIES = loader.multiplies_bfloat16  # tests are told that their processor does not (conftest.py)
NAN = float("nan")
COMPILER = os.environ.get("CC") or next(filter(shutil.which, c_build.COMPILERS), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
needs_guards = pytest.mark.skipif(os.name != "posix", reason="pages are guarded by mprotect")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
THEN = {
    "none": lambda y, other: y,
    "swish": lambda y, other: F.silu(y),
    "add": lambda y, other: y + other,
    "mul": lambda y, other: y * other,
}
# rows, in_features, out_features: around tiles (6 or 12 rows), panels (16 or 32), depths (128 or 256 numbers)
# and parts (120 rows)
SIZES = [
    (1, 1, 1), (2, 3, 15), (5, 256, 16), (6, 257, 17), (7, 255, 33), (11, 600, 31), (12, 128, 63),
    (13, 64, 160), (25, 127, 64), (119, 129, 32), (120, 20, 48), (121, 7, 40), (239, 20, 48), (241, 512, 5),
    (487, 130, 65),
]  # fmt: skip


BUILDS = {
    "as this CPU": "",
    "16 lanes": "-DLANES=16 -DWITHOUT_DPBF16 -w",  # the compiler makes them of shorter vectors
    "8 lanes": "-DLANES=8 -w",
}


@pytest.fixture(params=BUILDS)
def panels(request, tmp_path_factory, monkeypatch) -> Panels:
    """As they are here, and as on a CPU with shorter or longer vectors, without products of bfloat16."""
    if options := BUILDS[request.param]:
        monkeypatch.setenv("CC", f"{COMPILER} {options}")
        folder = tmp_path_factory.getbasetemp() / request.param.replace(" ", "-")
        monkeypatch.setattr(c_linear, "library", lambda: c_build.load(folder))
    made = Panels()
    if options:
        assert (made.size, made.multiplies_bfloat16) == (16 if "LANES=8" in options else 32, False)
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
    assert torch.equal(panels.unpack(kept, out_features, in_features), weight)
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
@pytest.mark.parametrize("columns, width, first", [(33, 60, 5), (32, 61, 4), (32, 60, 5), (1, 8, 2)])
def test_only_what_belongs_to_it_is_read_and_written(panels, dtype, columns, width, first):
    """Rows cut out of wider ones, with NaN around; in bfloat16 some begin or end within a word. And the rows
    of the last panel that stand for nothing."""
    weight = numbers(19, columns, dtype=dtype)
    x, other = numbers(8, columns, dtype=dtype, seed=1), numbers(8, 19, dtype=dtype, seed=2)
    wide_x, wide_other = (torch.full((10, width), NAN, dtype=dtype) for width in (width, 60))
    wide_x[1:9, first : first + columns], wide_other[1:9, 7:26] = x, other
    kept = panels.pack(weight)
    kept[-1, :, 19 % panels.size :] = NAN  # [panel, word, row, number in a word]
    given = wide_x[1:9, first : first + columns]
    got = panels.linear(given, kept, None, 19, "mul", wide_other[1:9, 7:26])
    close(got, (x.double() @ weight.double().T) * other.double(), columns, float(other.abs().max()))
    assert panels.linear(x[:0], kept, None, 19, "none", None).shape == (0, 19)


@needs_guards
@DTYPES
@pytest.mark.parametrize("then", ["swish", "add"])
def test_nothing_behind_a_tensor_is_read(panels, dtype, then):
    """Each ends where its memory does."""
    weight, x = numbers(19, 33, dtype=dtype), numbers(7, 33, dtype=dtype, seed=1)
    bias, other = numbers(19, dtype=dtype, seed=2), numbers(7, 19, dtype=dtype, seed=3)
    kept = panels.pack(weight)
    given = other if then == "add" else None
    expected = panels.linear(x, kept, bias, 19, then, given)
    given = None if given is None else guarded(given)
    assert torch.equal(panels.linear(guarded(x), kept, guarded(bias), 19, then, given), expected)


@DTYPES
def test_what_does_not_fit_together_is_not_multiplied(panels, dtype):
    kept, x = panels.pack(numbers(8, 6, dtype=dtype)), numbers(3, 6, dtype=dtype)
    wrong: dict[str, tuple[Tensor, Tensor | None, Tensor | None]] = {
        "columns": (numbers(3, 4, dtype=dtype), None, None),
        "another dtype": (x.to(torch.float64), None, None),
        "columns apart": (numbers(3, 12, dtype=dtype)[:, ::2], None, None),
        "no memory": (x.to("meta"), None, None),
        "a short bias": (x, numbers(7, dtype=dtype), None),
        "a bias with gaps": (x, numbers(16, dtype=dtype)[::2], None),
        "too few others": (x, None, numbers(1, 8, dtype=dtype)),
    }
    for name, (rows, bias, other) in wrong.items():
        try:
            panels.linear(rows, kept, bias, 8, "none" if other is None else "add", other)
        except (AssertionError, KeyError):
            continue
        pytest.fail(f"{name}: was multiplied")
    linear = packed.PackedLinear(nn.Linear(5, 8, bias=False, dtype=dtype), products=panels)
    with pytest.raises(AssertionError):
        linear(x)  # in bfloat16 as many words as 5 numbers have


@DTYPES
def test_what_is_packed_is_a_copy_in_any_shape(panels, dtype):
    for in_features in (1, 2, 3):
        weight = numbers(panels.size, in_features, dtype=dtype)
        kept = panels.pack(weight)
        before = kept.clone()
        weight.zero_()
        assert torch.equal(kept, before)


def test_the_instruction_for_bfloat16_is_used_where_the_compiler_has_it():
    """Its macro says so, and nothing else shows whether the code asked for it by the right name."""
    command = [*c_build.find_compiler(), *c_build.FLAGS, "-dM", "-E", "-x", "c", os.devnull]
    assert Panels().multiplies_bfloat16 == ("__AVX512BF16__" in c_build.run(command))


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
    assert products_for(torch.float16, CPU) is products_for(torch.float64, CPU) is None
    assert products_for(torch.float32, torch.device("meta")) is None

    def missing() -> None:
        raise InvalidOption("attention='c' is not possible: there is no C compiler.")

    monkeypatch.setattr(c_linear, "library", missing)
    assert isinstance(products_for(torch.float32, CPU), OneDNN)
    monkeypatch.setattr(packed, "can_pack", lambda dtype, device: False)
    assert products_for(torch.float32, CPU) is None


@pytest.mark.parametrize(
    "processor", [(), ("avx512_bf16",), ("avx512_bf16", "amx_bf16"), ("amx_bf16",)], ids=str
)
@pytest.mark.parametrize("compiled", [False, True])
def test_in_bfloat16_onednn_multiplies_where_it_has_instructions_that_we_have_not(
    monkeypatch, processor, compiled
):
    monkeypatch.setattr(loader, "_processor", lambda: dict.fromkeys(processor, True))
    monkeypatch.setattr(loader, "multiplies_bfloat16", MULTIPLIES)
    monkeypatch.setattr(packed, "can_pack", lambda dtype, device: True)
    init = Panels.__init__

    def compiled_so(self: Panels) -> None:
        init(self)
        self.multiplies_bfloat16 = compiled

    monkeypatch.setattr(Panels, "__init__", compiled_so)
    ours = not processor or (processor == ("avx512_bf16",) and compiled)
    assert isinstance(products_for(torch.bfloat16, CPU), Panels if ours else OneDNN)
    assert isinstance(products_for(torch.float32, CPU), Panels)
