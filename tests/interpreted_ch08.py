"""Chapter 8: the Triton kernels in the interpreter against the reference; `test_ch08_kernels.py` runs it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import MISFITS, Case, check_far_apart, pool_of_nan, well_formed

from minivllm import kernels
from minivllm.errors import InvalidOption
from minivllm.kernels import (
    block_copy,
    reference,
    triton_attention,
    triton_copy,
    triton_grouped,
    triton_naive,
    triton_tiled,
)

KERNELS = kernels.get("triton")
STEPS = ["triton-naive", "triton-tiled", "triton-grouped"]
EACH = pytest.mark.parametrize("name", ["triton", *STEPS])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])


@DTYPES
@pytest.mark.parametrize("heads, dim", [(2, 80), (3, 16), (40, 128)])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_store_kv_writes_each_slot_and_nothing_else(block_size, heads, dim, dtype):
    packed = torch.arange(7 * (2 * heads + 1) * dim).remainder(1009).view(7, -1, dim).to(dtype)
    k, v = packed[:, 1::2], packed[:, :-1:2]  # strides of their own
    slots = torch.randperm(9 * block_size)[:7]
    slots[[0, 4]] = -1
    expected = pool_of_nan(9, heads, block_size, dim, dtype)
    got = expected.clone()
    reference.store_kv(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    KERNELS.store_kv(k, v, got[:, 1, 0], got[:, 1, 1], slots)
    torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
    assert got.isfinite().sum() == 2 * 5 * heads * dim


@DTYPES
@pytest.mark.parametrize(
    "block_size, group, dim",
    [(1, 1, 16), (3, 7, 64), (8, 2, 80), (16, 3, 64), (16, 8, 16), (16, 1, 256), (32, 7, 80), (128, 3, 16)],
)
def test_paged_attention_is_the_references(block_size, group, dim, dtype):
    """Lengths around a block's, one query and several with history, rows in another order than tables."""
    lengths = [3 * block_size, 2 * block_size + 1, max(1, block_size - 1), 1, block_size, block_size + 1, 37]
    queries = [1, 2, 1, 1, block_size, 1, 12]
    queries = [min(q, n, 20) for q, n in zip(queries, lengths, strict=True)]
    Case.make(block_size, group, dim, lengths, queries, dtype, shared=2, seed=block_size).check()


@DTYPES
@pytest.mark.parametrize("block_size, group, dim", [(1, 1, 16), (3, 2, 80), (4, 3, 20), (16, 1, 256)])
@pytest.mark.parametrize("name", STEPS)
def test_each_step_to_the_last_kernel_is_the_reference_too(name, block_size, group, dim, dtype):
    """Smaller, since the interpreter goes from key to key where the kernel does."""
    lengths, queries = [2 * block_size + 1, 9, 1, block_size, 5], [2, 1, 1, 1, 5]
    queries = [min(q, n) for q, n in zip(queries, lengths, strict=True)]
    Case.make(block_size, group, dim, lengths, queries, dtype, shared=2, seed=block_size).check(name)


@pytest.mark.parametrize("name", STEPS[1:])
def test_a_step_over_several_tiles_of_keys(name):
    Case.make(16, 2, 80, [150, 64, 63, 65], [2, 1, 1, 1], torch.float16, kv_heads=1, shared=3).check(name)


@pytest.mark.parametrize("group", range(1, 9))
def test_one_query_of_every_group_size_over_many_tiles_of_keys(group):
    Case.make(16, group, 16, [150, 64, 63, 65], [1, 1, 1, 1], torch.float16, shared=4, seed=group).check()
    for name in STEPS:
        Case.make(2, group, 16, [7, 4], [1, 1], seed=group).check(name)


@EACH
def test_the_order_of_the_rows_changes_nothing(name):
    case = Case.make(8, 3, 16, [9, 5, 17, 8], [3, 4, 1, 2], kv_heads=1, seed=5)
    rows = case.run(kernels.get(name)).split(case.queries)
    order = [2, 0, 3, 1]
    q = torch.cat([case.q.split(case.queries)[i] for i in order])
    tables, lengths, queries = ([a[i] for i in order] for a in (case.tables, case.lengths, case.queries))
    moved = Case(case.k_cache, case.v_cache, q, tables, lengths, queries)
    expected = torch.cat([rows[i] for i in order])
    torch.testing.assert_close(moved.run(kernels.get(name)), expected, atol=1e-6, rtol=1e-6)


@EACH
def test_a_length_of_zero_gives_zeros_and_its_neighbours_their_own(name):
    case = Case.make(4, 3, 16, [0, 9, 0, 5], [1, 2, 3, 1])
    first, _, third, _ = case.check(name).split(case.queries)
    assert not first.any()
    assert not third.any()


@EACH
def test_out_is_filled_where_it_is_given_and_nothing_beside_it(name):
    case = Case.make(4, 3, 20, [7, 9], [5, 1])
    wide = torch.full((6, 14, 20), float("nan"))
    out = wide[:, 1:13:2]
    assert case.run(kernels.get(name), out) is out
    torch.testing.assert_close(out, case.run(reference), atol=2e-6, rtol=2e-6)
    out.fill_(float("nan"))
    assert wide.isnan().all()


def test_a_program_writes_the_rows_of_its_own_tile_alone(monkeypatch):
    """5 queries with 3 heads each fill 15 rows of 16: the last row is nobody's, and not the next tile's."""
    launch = triton_attention.paged_attention_kernel

    class FirstTile:
        def __getitem__(self, grid):
            return launch[1, grid[1]]

    case = Case.make(4, 3, 16, [12], [12])
    expected, out = case.run(reference), torch.full_like(case.q, float("nan"))
    monkeypatch.setattr(triton_attention, "paged_attention_kernel", FirstTile())
    case.run(KERNELS, out)
    torch.testing.assert_close(out[:5], expected[:5], atol=2e-6, rtol=2e-6)
    assert out[5:].isnan().all()


@pytest.mark.parametrize(
    "module, kernel, heads",
    [
        (triton_naive, "naive_kernel", 1),
        (triton_tiled, "tiled_kernel", 1),
        (triton_grouped, "grouped_kernel", 3),
    ],
    ids=STEPS,
)
def test_a_program_of_a_step_writes_the_heads_that_are_its_own(module, kernel, heads, monkeypatch):
    launch = getattr(module, kernel)

    class FirstProgram:
        def __getitem__(self, grid):
            assert grid == (5, 6 // heads)
            return launch[1, 1]

    case = Case.make(4, 3, 20, [9], [5])
    expected, out = case.run(reference), torch.full_like(case.q, float("nan"))
    monkeypatch.setattr(module, kernel, FirstProgram())
    case.run(module, out)
    torch.testing.assert_close(out[0, :heads], expected[0, :heads], atol=2e-6, rtol=2e-6)
    assert out.isfinite().sum() == heads * 20


@EACH
def test_nothing_to_do_is_no_fault(name):
    k = torch.empty(0, 2, 16)
    cache = torch.empty(3, 2, 4, 16)
    KERNELS.store_kv(k, k, cache, cache, torch.empty(0, dtype=torch.int64))
    tables, lengths = torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    attend = kernels.get(name).paged_attention
    assert attend(k, cache, cache, tables, lengths, starts, 1.0).shape == k.shape


@DTYPES
@pytest.mark.parametrize("num_splits", [2, 5, 11])
def test_keys_that_several_programs_share_give_the_references(monkeypatch, num_splits, dtype):
    """Also parts with no key at all: in float32 a tile has 16 keys, in float16 64. And a length of zero."""
    chosen = []

    def choose(*sizes: int) -> int:
        chosen.append(sizes)
        return num_splits

    monkeypatch.setattr(triton_attention, "choose_num_splits", choose)
    lengths = [150, 65, 1, 17, 0, 64]
    Case.make(8, 3, 20, lengths, [1] * 6, dtype, kv_heads=1, shared=1, seed=num_splits).check()
    assert chosen == [(6, -(-(19 + 2) * 8 // (16 if dtype == torch.float32 else 64)), 1)]
    Case.make(3, 3, 20, [90, 4], [4, 4], dtype, seed=num_splits).check(hints=True)  # 4 queries a tile
    assert len(chosen) == 2


def test_more_parts_than_are_combined_at_a_time(monkeypatch):
    """40 parts, 16 at a time: the weights of the first are scaled down when a larger one comes."""
    monkeypatch.setattr(triton_attention, "choose_num_splits", lambda *sizes: 40)
    case = Case.make(16, 1, 16, [640], [1], kv_heads=1)
    case.k_cache[case.tables[0][-1]] *= 9  # the last keys weigh most
    case.check()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_chunk_beside_a_decode_may_be_split(monkeypatch, num_splits):
    """Several tiles to a sequence, and a spare one, each in parts."""
    monkeypatch.setattr(triton_attention, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_attention, "choose_num_splits", lambda *sizes: num_splits)
    Case.make(4, 3, 16, [39, 70, 0, 21], [13, 1, 2, 20], kv_heads=1).check()


def test_scores_that_overflow_do_not_spread():
    """-1e40 is -inf in float32: such keys weigh nothing, also where they fill a tile."""
    case = Case.make(16, 1, 16, [40], [1], kv_heads=1)
    case.q.fill_(1e10)
    case.k_cache[case.tables[0][0]] = -1e30
    case.k_cache[case.tables[0][1]] = 1e-12
    case.k_cache[case.tables[0][2], :, :8] = 1e-12
    got, expected = case.run(KERNELS), case.run(reference)
    assert expected.isfinite().all()
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_one_row_of_two_that_sees_no_key_of_a_part_stays_finite(monkeypatch, num_splits):
    """18 tokens, two queries: the second part begins at key 16, which the query at position 15 cannot see."""
    monkeypatch.setattr(triton_attention, "choose_num_splits", lambda *sizes: num_splits)
    Case.make(4, 2, 16, [17, 33], [2, 2], kv_heads=1).check(hints=True)


@EACH
def test_a_large_score_does_not_overflow_and_a_late_one_takes_over(name):
    case = Case.make(16, 1, 16, [150], [1], kv_heads=1)
    case.k_cache *= 300
    case.check(name)


@EACH
def test_a_block_and_a_token_may_lie_beyond_two_to_the_31(name):
    check_far_apart(name)


@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 5, 16, 24]),
    st.integers(1, 8),
    st.sampled_from([8, 20, 48]),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5),
    st.integers(0, 2**30),
)
def test_any_mixture_of_sequences(block_size, group, dim, sequences, seed):
    lengths = [history + query if history else 0 for history, query in sequences]
    queries = [query for _, query in sequences]
    Case.make(block_size, group, dim, lengths, queries, kv_heads=1, seed=seed).check()


@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=6)
@given(
    st.sampled_from([1, 2, 5, 16]),
    st.integers(1, 3),
    st.sampled_from([8, 20, 48]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(0, 2**30),
)
def test_any_small_mixture_of_sequences_by_each_step(name, block_size, group, dim, sequences, seed):
    lengths = [history + query if history else 0 for history, query in sequences]
    queries = [query for _, query in sequences]
    Case.make(block_size, group, dim, lengths, queries, kv_heads=1, seed=seed).check(name)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("page", [(3, 2, 3, 5, 7), (2, 2, 4, 16, 16)], ids=["odd", "of one tile"])
def test_blocks_are_copied_whole_and_nothing_else(page, dtype):
    """Within a pool and from one to another, of another length; what is not copied stays, NaN and all."""
    pool = torch.arange(9 * math.prod(page)).remainder(251).view(9, *page).to(dtype)
    pool[4] = float("nan")
    other = torch.full((5, *page), 300.0, dtype=dtype)
    expected, expected_other = pool.clone(), other.clone()
    for module, kv, second in ((block_copy, expected, expected_other), (triton_copy, pool, other)):
        module.copy_blocks(kv, kv, [(0, 8), (4, 2), (0, 3)])
        module.copy_blocks(kv, second, [(5, 4), (8, 0)])
        module.copy_blocks(kv, kv, [])
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(other, expected_other, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(pool[8], pool[7])


def test_pools_whose_blocks_differ_are_refused():
    pool = torch.zeros(4, 2, 6)
    for other in (torch.zeros(4, 2, 5), torch.zeros(4, 2, 6).double(), torch.zeros(4, 6, 2).mT):
        with pytest.raises(InvalidOption, match=r"target.*one shape and dtype"):
            triton_copy.copy_blocks(pool, other, [(0, 1)])


@pytest.mark.parametrize("name", ["triton", "triton-naive"])
@pytest.mark.parametrize("changed", MISFITS.values(), ids=MISFITS)
def test_tensors_that_do_not_fit_together_are_refused_before_anything_is_written(changed, name):
    module = kernels.get(name)
    assert module.paged_attention(**well_formed(), scale=1.0).shape == (3, 4, 16)
    with pytest.raises(InvalidOption, match=r"paged_attention is not possible with q .*fit together"):
        module.paged_attention(**(well_formed() | changed), scale=1.0)


@pytest.mark.parametrize(
    "k, v, slots",
    [
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, 16), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 16), torch.zeros(1, 2, 16), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 2, 16), torch.zeros(2, 2, 16), torch.zeros(1, dtype=torch.int64)),
        (torch.zeros(2, 2, 16), torch.zeros(2, 2, 16), torch.zeros(2)),
    ],
    ids=["heads", "v", "slots", "float slots"],
)
def test_keys_that_do_not_fit_are_refused_before_anything_is_written(k, v, slots):
    cache = torch.zeros(5, 2, 4, 16)
    with pytest.raises(InvalidOption, match=r"store_kv is not possible with k .*fit together"):
        KERNELS.store_kv(k, v, cache, cache, slots)


@pytest.mark.parametrize("pair", [(-1, 0), (0, 4), (4, 0), (1, 2, 3)], ids=str)
def test_a_block_that_is_not_there_is_not_copied(pair):
    with pytest.raises(InvalidOption, match="copy_blocks is not possible with"):
        triton_copy.copy_blocks(torch.zeros(4, 6), torch.zeros(4, 6), [(0, 1), pair])


CACHE = torch.zeros(3, 2, 4, 16)


@pytest.mark.parametrize(
    "q, cache, named",
    [
        (torch.zeros(1, 2, 16).double(), CACHE.double(), "float64.*float32, float16, bfloat16"),
        (torch.zeros(1, 2, 16), CACHE.half(), "k_cache in float16.*float32"),
        (torch.zeros(1, 2, 257), torch.zeros(3, 2, 4, 257), "head_dim=257.*256"),
        (torch.zeros(1, 65, 16), CACHE[:, :1], "65 query heads.*64"),
        (torch.zeros(1, 2, 16, device="meta"), CACHE, "tensors on meta.*CUDA"),
        (torch.zeros(1, 16, 2).mT, CACHE, "q with a stride of 2.*contiguous"),
        (torch.zeros(1, 2, 16), CACHE.mT.contiguous().mT, "k_cache with a stride of 4.*contiguous"),
    ],
    ids=["float64", "mixed", "head_dim", "group", "device", "stride", "cache stride"],
)
def test_what_the_kernels_do_not_have_is_refused_by_name(q, cache, named):
    one = torch.ones(1, dtype=torch.int32)
    for name in ("triton", *STEPS):
        with pytest.raises(InvalidOption, match=f"attention='{name}'.*{named}"):
            kernels.get(name).paged_attention(q, cache, cache, one[None], one, torch.tensor([0, 1]), 1.0)
    if "query heads" not in named:
        with pytest.raises(InvalidOption, match=named.replace("q with", "k with")):
            KERNELS.store_kv(q, q, cache, cache, one.long())
