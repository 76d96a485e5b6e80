"""Chapter 8: fast paged attention in PyTorch against the reference: groups, tiles, and what they cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import TOLERANCE, Case, check_far_apart, pool_of_nan
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.kernels import reference, torch_paged
from minivllm.kernels.torch_paged import cut

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
NAN, INFINITY = float("nan"), float("inf")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@DTYPES
@pytest.mark.parametrize("dim", [1, 14, 20, 64, 80, 256])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 128])
def test_paged_attention_is_the_references(block_size, dim, dtype):
    """Lengths around a block's, one query and several with history, whole prompts, shared blocks."""
    lengths = [3 * block_size, 2 * block_size + 1, max(1, block_size - 1), 1, block_size, block_size + 1, 37]
    queries = [1, 2, 1, 1, block_size, 1, 37]
    queries = [min(q, n) for q, n in zip(queries, lengths, strict=True)]
    group = 1 + (block_size + dim) % 8
    Case.make(block_size, group, dim, lengths, queries, dtype, shared=2, seed=block_size).check("torch")


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 33])
def test_every_group_size_in_decode_and_over_several_tiles_of_queries(group):
    Case.make(16, group, 16, [150, 64, 63, 65, 1], [1] * 5, shared=4, seed=group).check("torch")
    Case.make(8, group, 20, [150, 64, 270, 33], [70, 64, 200, 2], kv_heads=1, seed=group).check("torch")


@pytest.mark.parametrize("poison", [NAN, INFINITY, -INFINITY], ids=["nan", "inf", "minus inf"])
def test_what_stands_in_unfilled_slots_and_beyond_a_table_cannot_matter(poison):
    case = Case.make(16, 2, 20, [9, 100, 17, 0, 48, 49, 33], [1, 1, 1, 1, 1, 40, 33])
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=poison)
    case.check("torch")
    width = max(map(len, case.tables)) + 3
    tables = int32(*[b for t in case.tables for b in t + [2**30] * (width - len(t))]).view(-1, width)
    starts = int32(0, *torch.tensor(case.queries).cumsum(0).tolist())
    got = torch_paged.paged_attention(
        case.q, case.k_cache, case.v_cache, tables, int32(*case.lengths), starts, 20**-0.5
    )
    assert torch.equal(got, case.run(torch_paged))


def test_in_float64_every_digit_is_the_references():
    case = Case.make(4, 3, 10, [9, 1, 70, 6], [1, 1, 66, 2])
    got, expected = (case.run(module, dtype=torch.float64) for module in (torch_paged, reference))
    torch.testing.assert_close(got, expected, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_with_16_bits_only_the_result_is_rounded(dtype):
    """What is nearer to another number of 16 bits by less than float32's error may become that."""
    case = Case.make(16, 3, 64, [150, 90, 33, 80], [1, 1, 1, 70], dtype)
    exact = case.run(reference, dtype=torch.float64)
    half = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(case.run(torch_paged).double(), exact, atol=2e-6, rtol=half)
    assert (case.run(reference).double() - exact).abs().max() > 2e-6 + half * exact.abs().max()


def test_the_order_of_the_rows_changes_nothing():
    case = Case.make(8, 3, 16, [9, 5, 17, 8, 30, 8], [3, 1, 1, 2, 1, 1], kv_heads=1, seed=5)
    rows, order = case.run(torch_paged).split(case.queries), [2, 0, 5, 3, 1, 4]
    q = torch.cat([case.q.split(case.queries)[i] for i in order])
    tables, lengths, queries = ([a[i] for i in order] for a in (case.tables, case.lengths, case.queries))
    moved = Case(case.k_cache, case.v_cache, q, tables, lengths, queries)
    expected = torch.cat([rows[i] for i in order])
    torch.testing.assert_close(moved.run(torch_paged), expected, atol=1e-6, rtol=1e-6)


def test_a_length_of_zero_gives_zeros_and_its_neighbours_their_own():
    case = Case.make(4, 3, 16, [0, 9, 0, 5], [1, 2, 3, 1])
    first, _, third, _ = case.check("torch").split(case.queries)
    assert not first.any()
    assert not third.any()


@DTYPES
def test_out_is_filled_where_it_is_given_and_nothing_beside_it(dtype):
    case = Case.make(4, 3, 20, [7, 9, 0], [5, 1, 2], dtype)
    wide = torch.full((8, 14, 20), NAN, dtype=dtype)
    out = wide[:, 1:13:2]
    assert case.run(torch_paged, out) is out
    assert torch.equal(out, case.run(torch_paged))
    out.fill_(NAN)
    assert wide.isnan().all()


def test_nothing_to_do_is_no_fault():
    k, cache = torch.empty(0, 2, 16), torch.empty(3, 2, 4, 16)
    torch_paged.store_kv(k, k, cache, cache, torch.empty(0, dtype=torch.int64))
    tables, lengths, starts = torch.empty(0, 1, dtype=torch.int32), int32(), int32(0)
    assert torch_paged.paged_attention(k, cache, cache, tables, lengths, starts, 1.0).shape == k.shape


def test_caches_of_other_strides_and_tables_of_other_kinds():
    """Slot before head, as other engines have it, head_dim before slot; int64, strided tables."""
    case = Case.make(4, 3, 20, [9, 14, 6], [1, 2, 1])
    expected = case.run(torch_paged)
    case.k_cache = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    case.v_cache = case.v_cache.mT.contiguous().mT
    assert torch.equal(case.run(torch_paged), expected)
    tables = torch.tensor([[t + [0] * (5 - len(t)), [0] * 5] for t in case.tables])[:, 0]
    lengths, starts = torch.tensor(case.lengths), torch.tensor([0, 1, 3, 4])
    got = torch_paged.paged_attention(case.q, case.k_cache, case.v_cache, tables, lengths, starts, 20**-0.5)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("factor", [300, -300, 1e30])
def test_a_large_score_does_not_overflow(factor):
    for lengths, queries in (([150], [1]), ([90], [70])):
        case = Case.make(16, 1, 16, lengths, queries, kv_heads=1)
        case.k_cache *= factor
        expected = case.run(reference, dtype=torch.float64).float()
        torch.testing.assert_close(case.run(torch_paged), expected, atol=1e-4, rtol=1e-4)


def test_nan_and_infinity_reach_the_queries_that_see_them_and_no_other():
    case = Case.make(4, 2, 16, [9, 40, 5], [3, 1, 1], kv_heads=1)
    case.k_cache[case.tables[0][2], :, 0] = NAN  # the last key of the first sequence
    case.v_cache[case.tables[2][0], :, 2, 3] = INFINITY
    got, expected = case.run(torch_paged), case.run(reference)
    assert got[:2].isfinite().all()
    assert got[2].isnan().all()
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert got[4, :, 3].isinf().all()


def test_a_block_and_a_token_may_lie_beyond_two_to_the_31():
    check_far_apart("torch")


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 5, 16, 24]),
    st.integers(1, 8),
    st.sampled_from([8, 20, 48, 64]),
    st.lists(
        st.tuples(st.integers(0, 400), st.one_of(st.just(1), st.integers(1, 90))), min_size=1, max_size=8
    ),
    st.integers(0, 2**30),
)
def test_any_mixture_of_sequences(block_size, group, dim, sequences, seed):
    lengths = [history + query if history else 0 for history, query in sequences]
    queries = [query for _, query in sequences]
    Case.make(block_size, group, dim, lengths, queries, kv_heads=2, seed=seed).check("torch")


def test_store_kv_writes_each_slot_and_nothing_else():
    k, v = torch.arange(2 * 7 * 3 * 5.0).view(2, 7, 3, 5)
    slots = torch.tensor([3, -1, 11, 0, 7, -1, 8])
    expected = pool_of_nan(4, 3, 3, 5, torch.float32)
    got = expected.clone()
    reference.store_kv(k, v, expected[:, 1, 0], expected[:, 1, 1], slots)
    torch_paged.store_kv(k, v, got[:, 1, 0], got[:, 1, 1], slots)
    torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)


# --- the plan of a step ---


def test_a_plan_serves_every_layer_and_reads_no_table_again():
    case = Case.make(4, 3, 20, [9, 14, 0, 6], [1, 12, 1, 1])
    tables = torch.nn.utils.rnn.pad_sequence([torch.tensor(t).int() for t in case.tables], batch_first=True)
    lengths, starts = int32(*case.lengths), int32(0, 1, 13, 14, 15)
    plan = torch_paged.prepare(tables, lengths, starts, 4)
    for factor in (1.0, 3.0):  # as two layers
        caches = case.k_cache * factor, case.v_cache - factor
        args = case.q, *caches, tables, lengths, starts, 20**-0.5
        expected = reference.paged_attention(*args)
        torch.testing.assert_close(
            torch_paged.paged_attention(*args, plan=plan), expected, atol=2e-6, rtol=2e-6
        )
    assert not any(group.blocks.max() >= len(case.k_cache) for group in plan.groups)
    assert [chunk.seq_len for chunk in plan.chunks] == [14, 0]


def test_groups_hold_neighbours_by_length_and_every_decode_stands_in_one(monkeypatch):
    monkeypatch.setattr(torch_paged, "GROUP_COST", 100)
    lengths = int32(16, 304, 20, 320, 9, 32)
    plan = torch_paged.prepare(torch.zeros(6, 20, dtype=torch.int32), lengths, torch.arange(7), 16)
    assert [group.rows.tolist() for group in plan.groups] == [[4, 0, 2, 5], [1, 3]]
    assert [group.unfilled.shape[2] for group in plan.groups] == [32, 320]
    for group in plan.groups:
        filled = (~group.unfilled).sum(dim=(1, 2))
        assert torch.equal(filled, lengths[group.rows])


def cost(lengths: list[int], parts: list[slice], group_cost: int) -> int:
    return sum(len(lengths[part]) * lengths[part][-1] + group_cost for part in parts)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), max_size=9), st.integers(0, 150), st.integers(1, 200))
def test_no_way_to_cut_into_groups_costs_less(lengths, group_cost, most):
    lengths.sort()
    parts = cut(lengths, group_cost, most)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(lengths)))
    possible = []
    for cuts in range(2 ** max(0, len(lengths) - 1)):
        inner = [i for i in range(1, len(lengths)) if cuts >> (i - 1) & 1]
        way = [slice(a, b) for a, b in pairwise([0, *inner, len(lengths)])] if lengths else []
        if all(part.stop - part.start == 1 or len(lengths[part]) * lengths[part][-1] <= most for part in way):
            possible.append(cost(lengths, way, group_cost))
    assert cost(lengths, parts, group_cost) == min(possible)
    for part in parts:
        assert part.stop - part.start == 1 or len(lengths[part]) * lengths[part][-1] <= most


def test_the_example_of_cut():
    lengths = [16, 16, 32, 304, 320]
    parts = cut(lengths, 100, 4096)
    assert [lengths[part] for part in parts] == [[16, 16, 32], [304, 320]]
    assert cost(lengths, parts, 100) == 96 + 640 + 2 * 100


# --- the memory that it takes ---


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation of this name gives."""

    def __init__(self):
        super().__init__()
        self.of: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            name = func.__name__.split(".")[0]
            self.of[name] = max(self.of.get(name, 0), result.numel())
        return result


def largest(case: Case, operation: str) -> int:
    with Largest() as found:
        case.run(torch_paged)
    case.check("torch")
    return found.of[operation]


def test_the_scores_of_a_long_prompt_stay_within_their_bound(monkeypatch):
    case = Case.make(8, 3, 8, [900, 40], [870, 1])  # 6 query heads
    monkeypatch.setattr(torch_paged, "MAX_SCORES", 20_000)
    assert 20_000 - 6 * 900 < largest(case, "_softmax") <= 20_000
    monkeypatch.setattr(torch_paged, "MAX_SCORES", 1)
    assert largest(case, "_softmax") == 6 * 900  # one query's


def test_the_gathered_tokens_of_many_sequences_stay_within_their_bound(monkeypatch):
    monkeypatch.setattr(torch_paged, "GROUP_COST", 10_000)
    case = Case.make(8, 3, 8, [95, 90, 96, 20, 10, 3], [1] * 6)  # 2 key/value heads
    assert largest(case, "bmm") == 2 * 6 * 3 * 96  # scores of all six
    monkeypatch.setattr(torch_paged, "MAX_GATHERED", 300)
    assert largest(case, "bmm") == 2 * 3 * 3 * 96
    monkeypatch.setattr(torch_paged, "MAX_GATHERED", 1)
    assert largest(case, "bmm") == 2 * 3 * 96
