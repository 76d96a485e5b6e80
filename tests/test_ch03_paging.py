"""Chapter 3: block pool and tables against plain models, and paged attention with poisoned memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm import kernels
from minivllm.errors import InvalidOption, OutOfBlocks
from minivllm.memory.blocks import BlockPool
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.paged import PagedManager, num_blocks_for, slot_mapping
from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model

BLOCK_SIZES = (1, 3, 16, 128)


@given(num_blocks=st.integers(0, 12), data=st.data())
def test_the_pool_agrees_with_a_plain_queue(num_blocks, data):
    pool, queue, in_use = BlockPool(num_blocks), list(range(num_blocks)), []
    for _ in range(data.draw(st.integers(0, 25))):
        what = data.draw(st.sampled_from(["allocate", "free", "take"]))
        if what == "allocate":
            n = data.draw(st.integers(0, 6))
            if n > len(queue):
                with pytest.raises(OutOfBlocks, match=f"{n} blocks are needed and {len(queue)}"):
                    pool.allocate(n)
            else:
                assert pool.allocate(n) == queue[:n]
                in_use += queue[:n]
                del queue[:n]
        elif what == "free" and in_use:
            back = data.draw(st.lists(st.sampled_from(in_use), unique=True))
            pool.free(back)
            queue += back
            in_use = [b for b in in_use if b not in back]
        elif what == "take" and num_blocks:
            block = data.draw(st.integers(0, num_blocks - 1))
            if block in queue:
                pool.take(block)
                queue.remove(block)
                in_use.append(block)
            else:
                with pytest.raises(OutOfBlocks, match=f"Block {block} is not free"):
                    pool.take(block)
        pool.check_integrity(in_use)
        assert pool.num_free_blocks == len(queue)
        assert [b for b in range(num_blocks) if pool.is_free(b)] == sorted(queue)
    pool.free(in_use)
    assert pool.allocate(num_blocks) == queue + in_use


@pytest.mark.parametrize("wrong", [[0, 0], [3], [0, 3], [-1], [9]], ids=str)
def test_a_block_given_back_twice_is_refused_and_nothing_changes(wrong):
    pool = BlockPool(5)
    in_use = pool.allocate(3)
    with pytest.raises(ValueError, match="given back twice, or were never handed out"):
        pool.free(wrong)
    pool.check_integrity(in_use)


OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 30)), max_size=40)


@given(num_blocks=st.integers(0, 14), block_size=st.sampled_from(BLOCK_SIZES), operations=OPERATIONS)
def test_the_paged_manager_agrees_with_a_plain_model(num_blocks, block_size, operations):
    manager = PagedManager(num_blocks, block_size, 3)
    tokens: dict[int, int] = {}

    def blocks(n: int) -> int:
        return math.ceil(n / block_size)

    for give_back, seq_id, n in operations:
        before = manager.snapshot()
        room = num_blocks - sum(blocks(t) for i, t in tokens.items() if i != seq_id)
        fits = blocks(max(n, tokens.get(seq_id, 0))) <= room
        assert manager.can_allocate(seq_id, n) == fits
        assert manager.fits_ever(n) == (blocks(n) <= num_blocks)
        assert manager.snapshot() == before, "a question changes nothing"
        if give_back:
            manager.free(seq_id)
            tokens.pop(seq_id, None)
        elif fits:
            manager.allocate(seq_id, n)
            tokens[seq_id] = max(n, tokens.get(seq_id, 0))
        else:
            with pytest.raises(OutOfBlocks, match=f"Sequence {seq_id} needs"):
                manager.allocate(seq_id, n)
            assert manager.snapshot() == before, "a refusal changes nothing"
        manager.check_integrity()
        found = {s.seq_id: (len(s.block_ids), s.held, s.used) for s in manager.snapshot().sequences}
        assert found == {i: (blocks(t), blocks(t) * block_size, t) for i, t in tokens.items()}
    for seq_id in range(5):
        manager.free(seq_id)
    assert manager.pool.num_free_blocks == num_blocks


def test_a_sequences_last_block_is_the_first_to_be_used_again():
    manager = PagedManager(4, 2, 1)
    manager.allocate(0, 8)
    table = manager.block_table(0)
    manager.free(0)
    manager.allocate(1, 2)
    assert manager.block_table(1) == table[-1:]


@given(block_size=st.integers(1, 9), n=st.integers(1, 60), data=st.data())
def test_each_token_has_a_slot_of_its_own_in_its_block(block_size, n, data):
    table = data.draw(st.permutations(range(num_blocks_for(n, block_size) + 3)))
    start = data.draw(st.integers(0, n))
    slots = slot_mapping(table, block_size, 0, n)
    assert slot_mapping(table, block_size, start, n) == slots[start:]
    assert len(set(slots)) == n
    for i, slot in enumerate(slots):
        assert (slot // block_size, slot % block_size) == (table[i // block_size], i % block_size)


def pool_of_nan(
    num_blocks: int, kv_heads: int, block_size: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one layer of a block-major pool, every number of it NaN."""
    kv = torch.full((num_blocks, 3, 2, kv_heads, block_size, dim), float("nan"), dtype=torch.float64)
    return kv[:, 1, 0], kv[:, 1, 1]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_paged_attention_is_attention_whatever_stands_in_unused_slots(block_size, group):
    torch.manual_seed(block_size * group)
    kv_heads, dim, kernel = 2, 10, kernels.get("reference")
    lengths = [1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size, 37]
    queries = [1, 1, block_size, 2, 1, 9]
    queries = [min(q, n) for q, n in zip(queries, lengths, strict=True)]
    counts = [num_blocks_for(n, block_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2).tolist()
    tables = [[order.pop() for _ in range(c)] for c in counts]
    k_cache, v_cache = pool_of_nan(sum(counts) + 2, kv_heads, block_size, dim)
    keys, values = ([torch.randn(n, kv_heads, dim, dtype=torch.float64) for n in lengths] for _ in range(2))
    for table, n, k, v in zip(tables, lengths, keys, values, strict=True):
        slots = torch.tensor(slot_mapping(table, block_size, 0, n))
        kernel.store_kv(k, v, k_cache, v_cache, slots)
    q = torch.randn(sum(queries), kv_heads * group, dim, dtype=torch.float64)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    width = max(counts) + 1
    padded = torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32)
    out = kernel.paged_attention(
        q, k_cache, v_cache, padded, torch.tensor(lengths, dtype=torch.int32), starts, scale=0.3
    )
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        torch.testing.assert_close(out[rows], causal_attention(q[rows], k, v, 0.3), atol=1e-12, rtol=1e-12)


def test_a_slot_of_minus_one_is_written_nowhere_and_a_length_of_zero_gives_zeros():
    kernel = kernels.get("reference")
    k_cache, v_cache = pool_of_nan(2, 1, 2, 4)
    k = torch.arange(12, dtype=torch.float64).view(3, 1, 4)
    kernel.store_kv(k, -k, k_cache, v_cache, torch.tensor([2, -1, 1]))
    written = k_cache.isfinite().all(dim=-1)[:, 0].tolist()
    assert written == [[False, True], [True, False]]
    assert torch.equal(k_cache[1, 0, 0], k[0, 0])
    assert torch.equal(v_cache[0, 0, 1], -k[2, 0])
    q = torch.ones(2, 1, 4, dtype=torch.float64)
    lengths, starts = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    out = kernel.paged_attention(
        q, k_cache, v_cache, torch.zeros(2, 1, dtype=torch.int32), lengths, starts, 1.0
    )
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_paged_memory_gives_the_logits_of_the_naive_cache(model, block_size):
    """Sequences come and go, blocks are used again with what an earlier sequence left in them."""
    decoder = load_model(f"random:{model}", dtype="float64", device="cpu", seed=2)
    config = decoder.config
    num_blocks = 2 * num_blocks_for(30, block_size) + 1
    manager, naive = PagedManager(num_blocks, block_size, 1), NaiveStore()
    paged = PagedStore(config, num_blocks, block_size, torch.float64)
    paged.kv.fill_(float("nan"))
    generator = torch.Generator().manual_seed(block_size)
    tokens = {i: torch.randint(0, 300, (30,), generator=generator).tolist() for i in range(5)}
    done = dict.fromkeys(tokens, 0)
    running, waiting = [0, 1], [2, 3, 4]
    while running:
        step = []
        for n, i in enumerate(running):
            count = min((1, 7, 13, 2)[(done[i] + n) % 4], 30 - done[i])
            manager.allocate(i, done[i] + count)
            step.append((i, tokens[i][done[i] : done[i] + count], done[i]))
            done[i] += count
        batch = Batch.pack(step[::-1])
        with torch.inference_mode():
            expected = decoder(batch, naive)
            got = decoder(PagedBatch.place(batch, manager), paged)
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)
        for i in [i for i in running if done[i] == 30]:
            manager.free(i)
            running.remove(i)
            running += [waiting.pop()] if waiting else []
        manager.check_integrity()
    assert manager.pool.num_free_blocks == num_blocks
    assert list(done.values()) == [30] * 5


def test_a_batch_without_places_is_refused():
    decoder = load_model("random:tiny-llama", device="cpu")
    with pytest.raises(TypeError, match="PagedBatch"):
        decoder(Batch.pack([(0, [1], 0)]), PagedStore(decoder.config, 2, 4))


def test_a_block_is_one_contiguous_page_and_a_layers_view_is_not_flat():
    store = PagedStore(load_model("random:tiny-llama", device="cpu").config, 3, 4)
    assert store.kv[1].is_contiguous()
    with pytest.raises(RuntimeError, match="view"):
        store.kv[:, 0, 0].view(-1)


def test_an_unknown_way_to_attend_is_refused():
    with pytest.raises(InvalidOption, match="attention='tpu'"):
        kernels.get("tpu")
