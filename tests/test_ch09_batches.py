"""Chapter 9: batches made from arrays, and block tables that stay, against those that are made anew."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.memory.paged import PagedManager
from minivllm.memory.paged_store import PagedBatch, padded
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.swap import SwapSpace
from minivllm.memory.table_rows import TableRows
from minivllm.model.batch import Batch
from minivllm.model.paged_batches import PagedBatches
from minivllm.params import SamplingParams
from minivllm.scheduling.chunked import ChunkedScheduler
from minivllm.scheduling.plan import ScheduledSequence
from minivllm.scheduling.request import Request, Status

CPU = torch.device("cpu")


@settings(max_examples=300)
@given(block_size=st.sampled_from([1, 3, 16]), seed=st.integers(0, 10**6), steps=st.integers(1, 30))
def test_rows_that_stay_are_those_that_are_written_anew(block_size, seed, steps):
    """Sequences come, fork, copy on write, end, come back under their old ids, and change places."""
    random, manager, rows = Random(seed), SharingManager(400, block_size, 1), TableRows()
    lengths: dict[int, int] = {}
    for _ in range(steps):
        for seq_id in list(lengths):
            if random.random() < 0.15:
                manager.free(seq_id)
                del lengths[seq_id]
        for parent in list(lengths):
            child = random.randrange(8)
            if child not in lengths and random.random() < 0.3:
                manager.fork(parent, child)
                lengths[child] = lengths[parent]
        for seq_id in range(8):
            if seq_id not in lengths and random.random() < 0.2:
                lengths[seq_id] = 0
        took_part = [seq_id for seq_id in lengths if lengths[seq_id] == 0 or random.random() < 0.9]
        if random.random() < 0.3:
            random.shuffle(took_part)
        before = [lengths[seq_id] for seq_id in took_part]
        for seq_id in took_part:
            lengths[seq_id] += random.choice([1, 1, 1, 5])
            manager.allocate(seq_id, lengths[seq_id])
        manager.take_copies()
        tables = [manager.tables[seq_id] for seq_id in took_part]
        got = rows.update(tables, np.array(before, dtype=np.int64) // block_size)
        assert got.dtype == np.int32
        assert got.tolist() == padded(tables, CPU).tolist()


def test_in_a_decode_step_the_rows_stay_where_they_are():
    manager, rows = PagedManager(50, 4, 1), TableRows()
    for seq_id, n in enumerate((9, 3, 6)):
        manager.allocate(seq_id, n)
    tables = [manager.tables[i] for i in range(3)]
    first = rows.update(tables, np.zeros(3, np.int64))
    manager.allocate(1, 5)  # a block more, and not the longest
    again = rows.update([manager.tables[i] for i in range(3)], np.array([2, 0, 1]))
    assert again is first
    assert again.flags.c_contiguous
    assert again.tolist() == padded(tables, CPU).tolist()


def plainly(parts: list[ScheduledSequence], manager: PagedManager) -> PagedBatch:
    """The batch of chapters 0 and 3."""
    new = [(p.sequence.seq_id, p.new_token_ids().tolist(), p.sequence.num_computed_tokens) for p in parts]
    batch = PagedBatch.place(Batch.pack(new), manager)
    samples = [row for row, part in enumerate(parts) if part.samples]
    return PagedBatch(**{**vars(batch), "logits_indices": batch.logits_indices[samples]})


def assert_same(got: PagedBatch, expected: PagedBatch) -> None:
    assert got.slices == expected.slices
    for name in {field.name for field in fields(PagedBatch)} - {"slices"}:
        a, b = getattr(got, name), getattr(expected, name)
        assert a.dtype == b.dtype, name
        assert a.tolist() == b.tolist(), name
        assert a.is_contiguous(), name


@pytest.mark.parametrize("kind", ["plain", "sharing", "prefixes", "swap"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_batch_from_arrays_is_the_batch_from_lists(kind, block_size):
    """Over whole runs in a small pool: chunks, preemption, groups, prefix hits, swapping, failed steps."""
    random, seen, preempted, swapped = Random(block_size), 0, 0, 0
    for budget, threshold in ((7, None), (64, 5), (500, None)):
        num_blocks = 80 // block_size + 2
        swap_space = SwapSpace(60 // block_size + 1) if kind == "swap" else None
        if kind == "plain":
            manager = PagedManager(num_blocks, block_size, 1)
        elif kind == "prefixes":
            manager = PrefixCachingManager(num_blocks, block_size, 1)
        else:
            manager = SharingManager(num_blocks, block_size, 1)
        scheduler = ChunkedScheduler(
            manager,
            7,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            swap_space=swap_space,
        )
        batches = PagedBatches(manager, CPU)
        for i in range(25):
            prompt = [random.randrange(100) for _ in range(random.randint(1, 30))]
            if i % 3 == 0:
                prompt = [*range(20), *prompt]
            n = random.choice([1, 1, 3]) if kind != "plain" and len(prompt) < 20 else 1
            params = SamplingParams(n=n, max_tokens=random.randint(1, 12), ignore_eos=True)
            scheduler.add(Request(i, prompt, params))
        while scheduler.has_unfinished():
            plan = scheduler.schedule()
            assert_same(batches(plan.scheduled), plainly(plan.scheduled, manager))
            seen += 1
            if random.random() < 0.04:
                scheduler.take_back(plan)
                continue
            samples = [s for part in plan.scheduled for s in part.samples]
            scheduler.update(plan, {s.seq_id: random.randrange(2**40) for s in samples})
            if random.random() < 0.05 and (running := scheduler.running):
                scheduler.abort(random.choice(running))
        preempted += scheduler.memory.counters.num_preemptions
        swapped += scheduler.memory.counters.num_swapped_in_blocks
    assert seen > 100
    assert preempted > 1
    assert (swapped > 3) == (kind == "swap")


def test_slots_beyond_32_bits_are_right():
    manager, size = PagedManager(5, 2**30, 1), 2**30
    request = Request(0, [1], SamplingParams(max_tokens=9))
    manager.allocate(7, 3 * size)
    manager.allocate(0, 5)
    request.status, request.first.num_computed_tokens = Status.RUNNING, 4
    request.sequences[0].append(6)
    part = ScheduledSequence(request, request.first, 1, (request.first,))
    request.first.token_ids *= 3
    batch = PagedBatches(manager, CPU)([part])
    assert batch.slot_mapping.tolist() == [3 * size + 4]
