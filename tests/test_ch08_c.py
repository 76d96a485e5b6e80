"""Chapter 8: the kernels in C against the reference; compiled once, and refused where they cannot be had."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from guard_pages import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import MISFITS, TOLERANCE, Case, check_far_apart, pool_of_nan, well_formed

from minivllm import kernels
from minivllm.errors import InvalidOption
from minivllm.kernels import c_build, c_paged, reference
from minivllm.memory.paged_store import padded

COMPILER = os.environ.get("CC") or next(filter(shutil.which, c_build.COMPILERS), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
NAN = float("nan")


@pytest.fixture(scope="module")
def c():
    return kernels.get("c")


@DTYPES
@pytest.mark.parametrize("heads, dim", [(2, 80), (3, 14), (40, 128)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_tokens", [7, 70])
def test_store_kv_writes_each_slot_and_nothing_else(c, num_tokens, block_size, heads, dim, dtype):
    """70 tokens are shared out among threads."""
    torch.set_num_threads(3)
    packed = torch.arange(num_tokens * (2 * heads + 1) * dim).remainder(1009).view(num_tokens, -1, dim)
    k, v = (packed.to(dtype)[:, start::2][:, :heads] for start in (1, 0))  # strides of their own
    slots = torch.randperm((num_tokens + 2) * block_size)[:num_tokens]
    slots[[0, 4]] = -1
    expected = pool_of_nan(num_tokens + 2, heads, block_size, dim, dtype)
    got = expected.clone()
    reference.store_kv(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    c.store_kv(k, v, got[:, 1, 0], got[:, 1, 1], slots)
    torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
    assert got.isfinite().sum() == 2 * (num_tokens - 2) * heads * dim


@DTYPES
@pytest.mark.parametrize("dim", [1, 14, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 32, 128])
def test_paged_attention_is_the_references(c, block_size, dim, dtype):
    """Lengths around a block's, one query and several with history, whole prompts, shared blocks."""
    lengths = [3 * block_size, 2 * block_size + 1, max(1, block_size - 1), 1, block_size, block_size + 1, 37]
    queries = [1, 2, 1, 1, block_size, 1, 37]
    queries = [min(q, n) for q, n in zip(queries, lengths, strict=True)]
    group = 1 + (block_size + dim) % 8
    Case.make(block_size, group, dim, lengths, queries, dtype, shared=2, seed=block_size).check("c")


@pytest.mark.parametrize("group", [*range(1, 9), 15, 16, 17, 33, 64])
def test_every_group_size_in_decode_and_over_several_tiles_of_queries(c, group):
    Case.make(16, group, 16, [150, 64, 63, 65, 1], [1] * 5, shared=4, seed=group).check("c")
    Case.make(8, group, 20, [150, 64, 70, 33], [70, 64, 1, 2], kv_heads=1, seed=group).check("c")


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dim", [20, 64])
def test_a_long_context_that_threads_share_gives_the_references(c, threads, dim):
    """With 4 threads also parts of which a query sees no key: 257 keys, 512 + 1, and three queries."""
    torch.set_num_threads(threads)
    Case.make(16, 3, dim, [2100], [1], kv_heads=1, seed=threads).check("c")
    Case.make(16, 2, dim, [257, 0, 513, 300, 5], [3, 1, 2, 1, 5], kv_heads=2, seed=threads).check("c")
    Case.make(16, 7, dim, [3000, 40, 1], [40, 1, 1], kv_heads=1, seed=threads).check("c")


def test_the_number_of_threads_is_pytorchs_and_their_library_is_too(c):
    """Two OpenMP libraries in a process would have two sets of threads, which wait while spinning."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}
    assert len(libraries) == 1


def test_the_order_of_the_rows_changes_nothing(c):
    case = Case.make(8, 3, 16, [9, 5, 17, 8], [3, 4, 1, 2], kv_heads=1, seed=5)
    rows, order = case.run(c).split(case.queries), [2, 0, 3, 1]
    q = torch.cat([case.q.split(case.queries)[i] for i in order])
    tables, lengths, queries = ([a[i] for i in order] for a in (case.tables, case.lengths, case.queries))
    moved = Case(case.k_cache, case.v_cache, q, tables, lengths, queries)
    assert torch.equal(moved.run(c), torch.cat([rows[i] for i in order]))


def test_a_length_of_zero_gives_zeros_and_its_neighbours_their_own(c):
    case = Case.make(4, 3, 16, [0, 9, 0, 5], [1, 2, 3, 1])
    first, _, third, _ = case.check("c").split(case.queries)
    assert not first.any()
    assert not third.any()


@DTYPES
def test_out_is_filled_where_it_is_given_and_nothing_beside_it(c, dtype):
    case = Case.make(4, 3, 20, [7, 9], [5, 1], dtype)
    wide = torch.full((6, 14, 20), NAN, dtype=dtype)
    out = wide[:, 1:13:2]
    assert case.run(c, out) is out
    assert torch.equal(out, case.run(c))
    out.fill_(NAN)
    assert wide.isnan().all()


def test_nothing_to_do_is_no_fault(c):
    k, cache = torch.empty(0, 2, 16), torch.empty(3, 2, 4, 16)
    c.store_kv(k, k, cache, cache, torch.empty(0, dtype=torch.int64))
    tables, lengths = torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    assert c.paged_attention(k, cache, cache, tables, lengths, starts, 1.0).shape == k.shape


def test_caches_of_other_strides_and_tables_of_other_kinds(c):
    """Slot before head, as other engines have it; ids and lengths in int64, strided tables."""
    case = Case.make(4, 3, 20, [9, 14], [2, 1])
    expected = case.run(c)
    case.k_cache = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case.run(c), expected)
    tables = torch.tensor([[t + [0] * (5 - len(t)), [0] * 5] for t in case.tables])[:, 0]
    starts = torch.tensor([0, 2, 3])
    got = c.paged_attention(
        case.q, case.k_cache, case.v_cache, tables, torch.tensor(case.lengths), starts, 20**-0.5
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("factor", [300, -300, 1e30])
def test_a_large_score_does_not_overflow_and_a_late_one_takes_over(c, factor):
    case = Case.make(16, 1, 16, [150], [1], kv_heads=1)
    case.k_cache *= factor
    case.check("c")


@DTYPES
def test_nan_and_infinity_reach_the_queries_that_see_them_and_no_other(c, dtype):
    case = Case.make(4, 2, 16, [9, 40, 5], [3, 1, 1], dtype, kv_heads=1)
    case.k_cache[case.tables[0][2], :, 0] = NAN  # the last key of the first sequence
    case.v_cache[case.tables[2][0], :, 2, 3] = float("inf")
    got, expected = case.run(c), case.run(reference)
    assert got[:2].isfinite().all()
    assert got[2].isnan().all()
    assert got[3].isfinite().all()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got[3:], expected[3:], atol=tolerance, rtol=tolerance, equal_nan=True)
    case.k_cache[case.tables[1][0]] = float("inf")  # scores of both signs, or of NaN
    assert case.run(c)[3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_every_number_of_16_bits_is_read_as_what_it_is(c, dtype):
    """One key a sequence: the result is its value. Infinity, NaN and the smallest numbers among them."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    values = numbers.view(256, 1, 1, 256)
    q, one = torch.zeros(256, 1, 256, dtype=dtype), torch.ones(256, dtype=torch.int32)
    tables, starts = torch.arange(256)[:, None], torch.arange(257)
    got = c.paged_attention(q, torch.zeros_like(values), values, tables, one, starts, 1.0)
    torch.testing.assert_close(got.flatten(), numbers, atol=0, rtol=0, equal_nan=True)


def test_a_block_and_a_token_may_lie_beyond_two_to_the_31(c):
    check_far_apart("c")


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 5, 16, 24]),
    st.integers(1, 8),
    st.sampled_from([8, 20, 48, 64]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 2**30),
)
def test_any_mixture_of_sequences(block_size, group, dim, sequences, threads, seed):
    torch.set_num_threads(threads)
    lengths = [history + query if history else 0 for history, query in sequences]
    queries = [query for _, query in sequences]
    Case.make(block_size, group, dim, lengths, queries, kv_heads=2, seed=seed).check("c")


CACHE = torch.zeros(3, 2, 4, 16)


@pytest.mark.parametrize(
    "q, cache, named",
    [
        (torch.zeros(1, 2, 16).double(), CACHE.double(), "float64.*float32, float16, bfloat16"),
        (torch.zeros(1, 2, 16), CACHE.half(), "k_cache in float16.*float32"),
        (torch.zeros(1, 2, 257), torch.zeros(3, 2, 4, 257), "head_dim=257.*256"),
        (torch.zeros(1, 65, 16), CACHE[:, :1], "65 query heads.*64"),
        (torch.zeros(1, 2, 16, device="meta"), CACHE, "tensors on meta.*only the CPU"),
        (torch.zeros(1, 16, 2).mT, CACHE, "q with a stride of 2.*contiguous"),
        (torch.zeros(1, 2, 16), CACHE.mT.contiguous().mT, "k_cache with a stride of 4.*contiguous"),
    ],
    ids=["float64", "mixed", "head_dim", "group", "device", "stride", "cache stride"],
)
def test_what_the_kernels_do_not_have_is_refused_by_name(c, q, cache, named):
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(InvalidOption, match=f"attention='c'.*{named}"):
        c.paged_attention(q, cache, cache, one[None], one, torch.tensor([0, 1]), 1.0)
    if "query heads" not in named:
        with pytest.raises(InvalidOption, match=named.replace("q with", "k with")):
            c.store_kv(q, q, cache, cache, one.long())


@pytest.mark.parametrize("changed", MISFITS.values(), ids=MISFITS)
def test_tensors_that_do_not_fit_together_are_refused_before_anything_is_written(c, changed):
    assert c.paged_attention(**well_formed(), scale=1.0).shape == (3, 4, 16)
    with pytest.raises(InvalidOption, match=r"paged_attention is not possible with q .*fit together"):
        c.paged_attention(**(well_formed() | changed), scale=1.0)
    with pytest.raises(InvalidOption, match=r"store_kv is not possible with k .*fit together"):
        c.store_kv(CACHE[0, :, :3], CACHE[0], CACHE, CACHE, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("options", ["-DLANES=8", "-DLANES=16", "-DLANES=16 -DWITHOUT_DPBF16"])
def test_registers_of_any_width(options, tmp_path, monkeypatch):
    """AVX-512 has room for sixteen numbers; elsewhere the compiler makes two registers of them. And with or
    without an instruction for products of bfloat16."""
    monkeypatch.setenv("CC", f"{COMPILER} {options} -w")
    compiled = c_build.load(tmp_path)
    monkeypatch.setattr(c_paged, "library", lambda: compiled)
    for dim in (1, 20, 64, 80, 256):
        Case.make(16, 3, dim, [150, 64, 63, 0, 1], [70, 1, 2, 0, 1], seed=dim).check("c")
        Case.make(5, 4, dim, [40, 33, 0, 1], [1, 33, 0, 1], torch.bfloat16, seed=dim).check("c")


@DTYPES
@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_any_scale_leaves_later_keys_unseen(c, scale, dtype):
    """The scores of keys that a query does not see are -inf, whatever the others are multiplied by."""
    case = Case.make(8, 3, 20, [50, 33, 9], [50, 1, 9], dtype)
    starts = torch.tensor([0, 50, 51, 60], dtype=torch.int32)
    tables, lengths = padded(case.tables, torch.device("cpu")), torch.tensor(case.lengths, dtype=torch.int32)
    given = case.q, case.k_cache, case.v_cache, tables, lengths, starts, scale
    expected = reference.paged_attention(*given)
    torch.testing.assert_close(
        c.paged_attention(*given), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.skipif(os.name != "posix", reason="pages are guarded by mprotect")
@DTYPES
def test_nothing_behind_a_tensor_is_read(c, dtype):
    """Pool, tables, queries and result each end where their memory does; the last slot is a token's."""
    num_blocks, block_size, dim = 4, 5, 20
    k_cache, v_cache = (guarded(torch.randn(num_blocks, 2, block_size, dim).to(dtype)) for _ in range(2))
    q, out = guarded(torch.randn(3, 6, dim).to(dtype)), guarded(torch.zeros(3, 6, dim, dtype=dtype))
    tables = guarded(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    lengths, starts = torch.tensor([7, 10], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
    given = q, k_cache, v_cache, tables, guarded(lengths), guarded(starts), dim**-0.5
    expected = reference.paged_attention(*given)
    c.paged_attention(*given, out=out)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    k = guarded(torch.randn(1, 2, dim).to(dtype))
    c.store_kv(k, k, k_cache, v_cache, guarded(torch.tensor([19])))
    assert torch.equal(k_cache[3, :, 4], k[0])


def test_one_plan_serves_layers_of_any_layout(c):
    """The next layer may have other strides, another dtype, another scale; a misfit is refused as ever."""
    case = Case.make(16, 3, 20, [150, 64, 1], [70, 1, 1], shared=2)
    starts = torch.tensor([0, 70, 71, 72], dtype=torch.int32)
    tables = padded(case.tables, torch.device("cpu"))
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    plan = c.prepare(tables, lengths, starts, 16)
    given = case.q, case.k_cache, case.v_cache
    half = case.q.bfloat16(), case.k_cache.bfloat16(), case.v_cache.bfloat16()
    dense = case.q.contiguous(), case.k_cache.contiguous(), case.v_cache.contiguous()
    for q, k_cache, v_cache in (given, dense, half, dense):
        for scale in (0.3, 0.5):
            expected = reference.paged_attention(q, k_cache, v_cache, tables, lengths, starts, scale)
            got = c.paged_attention(q, k_cache, v_cache, tables, lengths, starts, scale, plan=plan)
            torch.testing.assert_close(got, expected, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    with pytest.raises(InvalidOption, match="do not fit together"):
        c.paged_attention(dense[0][:, :, :10], *dense[1:], tables, lengths, starts, 0.3, plan=plan)
    slots = torch.tensor([5, -1, 7])
    for k_cache in (dense[1], case.k_cache):
        k = torch.randn(3, k_cache.shape[1], 20)
        for shifted in (k, k + 1):
            c.store_kv(shifted, shifted, k_cache, dense[2], slots, plan=plan)
            assert torch.equal(k_cache[0, :, 5], shifted[0])
    with pytest.raises(InvalidOption, match="do not fit together"):
        c.store_kv(k[:2], k, dense[1], dense[2], slots, plan=plan)


@pytest.mark.parametrize("threads", [1, 2])
def test_scores_beyond_any_number_show_as_they_do_in_the_reference(threads, c):
    """-inf, all of them: NaN, and not the zeros of a sequence without keys."""
    torch.set_num_threads(threads)
    k = torch.full((19, 1, 16, 8), -1e20)
    arguments = torch.full((1, 2, 8), 1e20), k, torch.ones_like(k), torch.arange(19).int()[None]
    lengths = torch.tensor([300]).int(), torch.tensor([0, 1]).int(), 1.0
    for module in (reference, c):
        assert module.paged_attention(*arguments, *lengths).isnan().all()


def test_without_a_compiler_the_default_is_torch_with_a_warning(monkeypatch):
    cpu = torch.device("cpu")

    def missing():
        raise InvalidOption("attention='c' is not possible: there is no C compiler.")

    monkeypatch.setattr(c_paged, "library", missing)
    with pytest.warns(RuntimeWarning, match="PyTorch's slower attention is used.*no C compiler"):
        assert kernels.fastest(torch.float32, cpu, 64, 3) == "torch"


def test_a_model_that_the_kernels_cannot_serve_is_refused_and_is_not_given_them(c):
    cpu = torch.device("cpu")
    kernels.check_model("c", torch.bfloat16, cpu, 64, 3)
    with pytest.raises(InvalidOption, match=r"attention='c'.*float64"):
        kernels.check_model("c", torch.float64, cpu, 64, 3)
    assert kernels.fastest(torch.float32, cpu, 64, 3) == "c"
    assert kernels.fastest(torch.float64, cpu, 64, 3) == "torch"
    assert kernels.fastest(torch.float32, cpu, 300, 3) == "torch"
    assert kernels.get_copy("c") is kernels.get_copy("torch")


def script(path, text: str) -> str:
    """An executable file of this text."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_source_is_compiled_once_and_found_again(tmp_path, monkeypatch):
    """By several threads at once, as by several processes; another compiler has a file of its own."""
    log = tmp_path / "log"
    monkeypatch.setenv("CC", script(tmp_path / "cc", f'echo "$@" >> {log}\nexec {COMPILER} "$@"'))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(c_build.load, [tmp_path / "kept"] * 3))
    c_build.load(tmp_path / "kept")
    assert log.read_text().count("-shared") == 1
    assert len(list((tmp_path / "kept").glob("*.so"))) == 1
    assert not [path for path in (tmp_path / "kept").iterdir() if path.suffix not in (".so", ".lock")]
    monkeypatch.setenv("CC", f"{tmp_path / 'cc'} -DOTHER")
    c_build.load(tmp_path / "kept")
    assert len(list((tmp_path / "kept").glob("*.so"))) == 2


def test_a_file_that_was_cut_short_or_is_no_library_of_ours_is_compiled_anew(tmp_path):
    """Loading the first half of a library ends the process: none of that kind is ever loaded."""
    c_build.load(tmp_path)
    (made,) = tmp_path.glob("*.so")
    whole = made.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        for path in tmp_path.glob("*.so"):
            path.unlink()
        made.write_bytes(damaged)
        code = "import sys; from pathlib import Path; from minivllm.kernels import c_build"
        code = f"{code}; print(c_build.load(Path(sys.argv[1])).linear is not None)"
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        assert len([path for path in tmp_path.glob("*.so") if path.read_bytes() != damaged]) == 1


def test_the_source_gives_no_warning():
    sources = [str(Path(c_build.__file__).with_name(name)) for name in c_build.SOURCES]
    warnings = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    c_build.run([*c_build.find_compiler(), *c_build.FLAGS, *warnings, *sources])


def test_without_a_compiler_it_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InvalidOption, match=r"no C compiler \(none of cc, gcc, clang\).*gcc.*attention='torch'"
    ):
        c_build.load(tmp_path)
    monkeypatch.setenv("CC", "no-such-cc -O1")
    with pytest.raises(InvalidOption, match=r"in CC, no-such-cc, is not there.*attention='torch'"):
        c_build.load(tmp_path)
    monkeypatch.setenv("CC", "gcc '-O1")
    with pytest.raises(InvalidOption, match=r"in CC, \"gcc '-O1\", is no command \(No closing quotation\)"):
        c_build.load(tmp_path)


@pytest.mark.parametrize(
    "text, said",
    [
        ("echo warning: x >&2; echo 'c.c:1: error: no such option' >&2; exit 1", "no such option"),
        ("exit 7", "exit code 7"),
        ("exit 0", "made no file"),
        ("for last; do :; done; echo rubbish > $last", "cannot be written or loaded"),
    ],
    ids=["error", "silent", "no file", "no library"],
)
def test_a_broken_compiler_is_refused_with_what_it_said(text, said, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", script(tmp_path / "cc", text))
    with pytest.raises(InvalidOption, match=f"(?s){said}.*attention='torch'"):
        c_build.load(tmp_path / "kept")


def test_a_folder_that_cannot_be_written_is_refused_by_its_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOption, match=r"file/kernels.*cannot be written.*MINIVLLM_HOME"):
        c_build.load(tmp_path / "file" / "kernels")
