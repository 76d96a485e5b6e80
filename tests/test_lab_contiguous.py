"""What the lab shows of contiguous memory: the buddy allocator's steps, the parts of a run, compaction."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from minivllm.errors import InvalidOption, OutOfMemory
from minivllm.lab.compacting import CompactingManager, PackedManager
from minivllm.lab.compaction_run import run_and_compact
from minivllm.lab.draw_buddy import draw_buddy, trace_buddy
from minivllm.lab.draw_waste import PARTS, draw_waste, waste_parts
from minivllm.lab.workload import make_workload
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.contiguous import RESERVATIONS, ContiguousManager
from minivllm.model.loader import load_model


def runs_of(state):
    return sorted([*state.free, *((start, length) for _, start, _, length in state.used)])


@given(
    num_slots=st.integers(1, 40),
    operations=st.lists(st.tuples(st.sampled_from("ABCDE"), st.integers(1, 20)), max_size=12),
)
def test_each_row_of_the_trace_has_every_slot_once_and_the_rows_differ_by_one_cut(num_slots, operations):
    allocator = BuddyAllocator(num_slots)
    live: dict[str, int] = {}
    done: list[tuple[str, int]] = []
    for name, n in operations:
        if name in live:
            allocator.free(live.pop(name))
            done.append((name, 0))
        else:
            done.append((name, n))
            try:
                live[name] = allocator.allocate(n)
            except OutOfMemory:
                continue
    states = trace_buddy(num_slots, done)
    for state in states:
        at = 0
        for start, length in runs_of(state):
            assert start == at
            assert start % length == 0
            at += length
        assert at == num_slots
    for before, after in pairwise(states):
        assert abs(len(runs_of(after)) - len(runs_of(before))) <= 1
    assert states[-1].free == tuple(allocator.free_runs)


def test_the_trace_names_what_was_done():
    states = trace_buddy(8, [("A", 3), ("B", 5), ("A", 0)])
    assert [state.title for state in states] == [
        "8 free slots", "split 8", "A = allocate(3)", "allocate(5): OutOfMemory", "free(A)", "join two of 4",
    ]  # fmt: skip
    assert states[2].used == (("A", 0, 3, 4),)
    texts = [text.get_text() for text in draw_buddy(states).axes[0].texts]
    assert [text for text in texts if text in {state.title for state in states}] == [s.title for s in states]
    assert texts.count("A: 3 + 1") == 2
    with pytest.raises(ValueError, match="at least one state"):
        draw_buddy([])


@given(
    policy=st.sampled_from(list(RESERVATIONS)),
    sequences=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(0, 12)), max_size=7),
    wanted=st.sampled_from([0, 1, 16, 64]),
)
def test_every_slot_is_one_part_and_the_parts_add_up(policy, sequences, wanted):
    manager, final = ContiguousManager(150, 1, 32, policy), {}
    for i, (prompt, output, so_far) in enumerate(sequences):
        manager.expect(i, prompt, output)
        if manager.can_allocate(i, prompt):
            manager.allocate(i, prompt + min(output, so_far))
            final[i] = prompt + output
    snapshot = manager.snapshot()
    parts = waste_parts(snapshot, final, wanted)
    at = 0
    for part in parts:
        assert part.start == at
        assert part.length > 0
        at += part.length
    assert at == 150
    count = {kind: sum(p.length for p in parts if p.kind == kind) for kind in PARTS}
    assert count["used"] == snapshot.used
    assert count["later"] == sum(final.values()) - snapshot.used
    assert count["rounding"] == snapshot.held - sum(s.reserved for s in snapshot.sequences)
    assert count["free"] + count["useless"] == snapshot.free
    assert count["free"] == sum(length for _, length in snapshot.free_runs if length >= wanted)


def test_the_free_runs_of_a_snapshot_are_its_gaps():
    manager = ContiguousManager(64, 1, 8, "max")
    for i in range(8):
        manager.allocate(i, 3)
    for i in (1, 4, 5):
        manager.free(i)
    assert manager.snapshot().free_runs == ((8, 8), (32, 16))
    parts = waste_parts(manager.snapshot(), dict.fromkeys(range(8), 7), wanted=16)
    ax = draw_waste(parts, slots_per_row=40).axes[0]
    drawn = sorted(
        (patch.get_y(), patch.get_x(), patch.get_width())
        for patch in ax.patches
        if isinstance(patch, Rectangle)
    )
    assert sum(width for _, _, width in drawn) == 64
    assert [text.get_text() for text in ax.texts].count("8") == 3  # a run of 16 is cut where its row ends
    with pytest.raises(ValueError, match="no picture"):
        draw_waste([])


STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 6), st.integers(1, 20), st.integers(0, 12)), max_size=40
)


@given(policy=st.sampled_from(list(RESERVATIONS)), num_slots=st.integers(32, 150), steps=STEPS)
def test_compaction_admits_whatever_fits_once_the_runs_are_packed(policy, num_slots, steps):
    manager = CompactingManager(num_slots, 2, 32, policy)
    running: set[int] = set()
    for leave, seq_id, prompt, output in steps:
        if leave or seq_id in running:
            manager.free(seq_id)
            running.discard(seq_id)
            continue
        manager.expect(seq_id, prompt, output)
        before = manager.snapshot()
        answer = manager.can_allocate(seq_id, prompt)
        assert manager.snapshot() == before, "a question changes nothing"
        packed = BuddyAllocator(num_slots)
        for length in sorted((s.held for s in before.sequences), reverse=True):
            packed.allocate(length)
        reserved = min(RESERVATIONS[policy](prompt, output, 32), BuddyAllocator(num_slots).largest_free_run)
        assert answer == (
            BuddyAllocator.run_length(max(reserved, prompt + output)) <= packed.largest_free_run
        )
        if answer:
            manager.allocate(seq_id, prompt)
            running.add(seq_id)
        else:
            with pytest.raises(OutOfMemory):
                manager.allocate(seq_id, prompt)
            manager.free(seq_id)
        manager.check_integrity()


def test_compaction_counts_what_it_moves():
    manager = CompactingManager(64, 1, 16, "oracle")
    for i in range(4):
        manager.expect(i, 10 + i, 3)
        manager.allocate(i, 10 + i)
    manager.free(0)
    manager.free(2)
    manager.expect(9, 20, 5)
    assert manager.can_allocate(9, 20)
    manager.allocate(9, 20)
    # of the runs at 16 and 48 only the second must move when the first goes to 0: both are moved
    assert (manager.num_compactions, manager.moved) == (1, 11 + 13)


@given(policy=st.sampled_from(list(RESERVATIONS)), num_slots=st.integers(32, 150), steps=STEPS)
def test_packed_memory_reserves_to_the_slot(policy, num_slots, steps):
    manager = PackedManager(num_slots, 2, 32, policy)
    held: dict[int, int] = {}
    for leave, seq_id, prompt, output in steps:
        if leave or seq_id in held:
            manager.free(seq_id)
            held.pop(seq_id, None)
            continue
        manager.expect(seq_id, prompt, output)
        reserved = RESERVATIONS[policy](prompt, output, 32)
        fits = sum(held.values()) + reserved <= num_slots
        assert manager.can_allocate(seq_id, prompt) == fits
        if fits:
            manager.allocate(seq_id, prompt)
            held[seq_id] = reserved
        else:
            with pytest.raises(OutOfMemory, match="slots are free"):
                manager.allocate(seq_id, prompt)
            manager.free(seq_id)
        manager.check_integrity()
        snapshot = manager.snapshot()
        assert {s.seq_id: s.held for s in snapshot.sequences} == held
        assert snapshot.largest_free_run == snapshot.free == sum(length for _, length in snapshot.free_runs)


def test_a_run_that_is_compacted_in_the_middle_gives_the_same_tokens():
    model = load_model("random:tiny-llama", dtype="float64", device="cpu", seed=3)
    requests = make_workload(9, 4, mean_in=9, mean_out=8, max_in=20, max_out=20, vocab_size=300)
    plain = run_and_compact(model, requests, num_slots=128, after_step=5, compact=False)
    moved = run_and_compact(model, requests, num_slots=128, after_step=5)
    assert moved.outputs == plain.outputs
    assert moved.before == plain.before
    assert moved.moves
    tokens = sum(move.length for move in moved.moves)
    assert moved.moved_bytes == tokens * model.config.kv_elements_per_token * 8
    assert moved.after.largest_free_run >= moved.before.largest_free_run
    with pytest.raises(InvalidOption, match="after_step=99"):
        run_and_compact(model, requests, num_slots=128, after_step=99)
