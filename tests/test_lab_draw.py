"""The pictures show what the books say: first the plain data, then what stands on the figure."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from minivllm.errors import InvalidOption
from minivllm.lab.draw import NOT_PHYSICAL, NOTHING, draw_film_strip, draw_memory_map, draw_memory_maps
from minivllm.lab.draw_steps import KINDS, draw_timeline, draw_utilisation
from minivllm.lab.record import StepRecord
from minivllm.lab.segments import PALETTE, Segment, byte_unit, colour, format_bytes, label, segments
from minivllm.lab.timeline import timeline
from minivllm.memory.contiguous import RESERVATIONS, ContiguousManager
from minivllm.memory.manager import KVManager, RecomputeManager, SequenceMemory, Snapshot
from minivllm.memory.naive import NaiveManager
from minivllm.memory.paged import PagedManager, PagedSequenceMemory, PagedSnapshot
from minivllm.memory.prefix_cache import PrefixCachingManager, PrefixSnapshot
from minivllm.memory.sharing import SharedSnapshot
from minivllm.step import ScheduledRequest, Step

MEMORIES = st.one_of(
    st.builds(PagedManager, st.integers(1, 40), st.integers(1, 9), st.just(24)),
    st.builds(
        ContiguousManager, st.integers(1, 150), st.just(24), st.just(32), st.sampled_from([*RESERVATIONS])
    ),
    st.builds(NaiveManager, st.integers(1, 150), st.just(24)),
    st.builds(RecomputeManager, st.integers(1, 150), st.just(24)),
)
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 11), st.integers(1, 20)), max_size=25)


def fill(manager: KVManager, steps: list[tuple[bool, int, int]]) -> Snapshot:
    """Let sequences come, grow and go as far as the memory allows."""
    started = set()
    for free, seq_id, n in steps:
        if free:
            manager.free(seq_id)
            started.discard(seq_id)
            continue
        if seq_id not in started:
            manager.expect(seq_id, n, 5)
        if manager.can_allocate(seq_id, n):
            manager.allocate(seq_id, n)
            started.add(seq_id)
    return manager.snapshot()


def paged_snapshot() -> PagedSnapshot:
    """6 blocks of 4: sequence 9 has blocks 4 and 1 and 7 tokens, sequence 2 has block 0 and 1 token."""
    sequences = (PagedSequenceMemory(9, 8, 7, (4, 1)), PagedSequenceMemory(2, 4, 1, (0,)))
    return PagedSnapshot(24, 24, sequences, 4)


def collection(ax: Axes, gid: str) -> Any:
    (found,) = [c for c in ax.collections if c.get_gid() == gid]
    return found


def drawn_slots(ax: Axes, gid: str) -> list[tuple[int, int]]:
    """(row, slot within the row) of every slot under the rectangles of a kind."""
    slots = []
    for path in collection(ax, gid).get_paths():
        (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
        slots += [(round((top + bottom) / 2), x) for x in range(round(left), round(right))]
    return slots


def texts(figure: Figure, gid: str) -> list[str]:
    return [t.get_text() for ax in figure.axes for t in ax.texts if t.get_gid() == gid]


def title(ax: Axes) -> str:
    """What stands above a map, on one line, with plain spaces."""
    return ax.get_title("left").replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")


def legend_labels(figure: Figure) -> list[str]:
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes)]
    return [text.get_text() for legend in legends if legend for text in legend.get_texts()]


def render(figure: Figure) -> None:
    """Draw every pixel; a warning, as of a layout that fails, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()


# --- memory: data ---


@given(manager=MEMORIES, steps=STEPS)
def test_segments_cover_every_slot_once_and_agree_with_the_books(manager, steps):
    snapshot = fill(manager, steps)
    found = segments(snapshot)
    assert [i for s in found for i in range(s.start, s.start + s.length)] == list(range(snapshot.num_slots))
    assert all(0 <= s.used <= s.length and s.length > 0 for s in found)
    held: Counter[int | None] = Counter()
    used: Counter[int | None] = Counter()
    for s in found:
        held[s.seq_id] += s.length
        used[s.seq_id] += s.used
    assert (held.pop(None, 0), used.pop(None, 0)) == (snapshot.free, 0)
    assert held == {s.seq_id: s.held for s in snapshot.sequences}
    assert used == {s.seq_id: s.used for s in snapshot.sequences}


def test_a_block_is_filled_in_the_order_of_the_table_not_of_the_addresses():
    found = [(s.seq_id, s.start, s.length, s.used) for s in segments(paged_snapshot())]
    assert found == [
        (2, 0, 4, 1), (9, 4, 4, 3), (None, 8, 4, 0), (None, 12, 4, 0), (9, 16, 4, 4), (None, 20, 4, 0),
    ]  # fmt: skip


def test_a_run_lies_where_it_starts_and_a_free_gap_is_one_segment():
    manager = ContiguousManager(13, 24, 4, "max")
    for i in range(3):
        manager.allocate(i, i + 1)
    manager.free(1)
    found = [(s.seq_id, s.start, s.length, s.used) for s in segments(manager.snapshot())]
    assert found == [(None, 0, 4, 0), (2, 4, 4, 3), (0, 8, 4, 1), (None, 12, 1, 0)]


@given(
    steps=st.lists(st.tuples(st.sampled_from(["grow", "fork", "free"]), st.integers(0, 5), st.integers(1, 9)))
)
def test_shared_and_cached_blocks_are_segments_that_agree_with_the_books(steps):
    manager, lengths, children = PrefixCachingManager(12, 3, 24), dict[int, int](), 6
    for what, i, n in steps:
        if what == "grow" and manager.can_allocate(i, lengths.get(i, 0) + n):
            lengths[i] = lengths.get(i, 0) + n
            manager.allocate(i, lengths[i])
            manager.take_copies()
            manager.register(i, [i // 2] * lengths[i])
        elif what == "fork" and i in lengths:
            manager.fork(i, children)
            lengths[children], children = lengths[i], children + 1
        elif what == "free" and lengths:
            gone = [*lengths][i % len(lengths)]
            manager.free(gone)
            del lengths[gone]
    snapshot = manager.snapshot()
    found = segments(snapshot)
    assert [i for s in found for i in range(s.start, s.start + s.length)] == list(range(36))
    taken = [s for s in found if s.seq_id is not None]
    assert (sum(s.length for s in taken), sum(s.used for s in taken)) == (snapshot.held, snapshot.used)
    assert {s.start // 3: s.ref_count for s in taken} == snapshot.ref_count
    assert {s.start // 3 for s in found if s.cached} == set(snapshot.cached)
    first = {b: s.seq_id for s in reversed(snapshot.sequences) for b in s.block_ids}
    assert {s.start // 3: s.seq_id for s in taken} == first, "the colour is that of the first holder"


def shared_snapshot() -> PrefixSnapshot:
    """6 blocks of 4: 5 and its fork share block 3; 5.1 has block 1 of its own; blocks 0 and 4 are cached."""
    sequences = (PagedSequenceMemory(5, 8, 6, (3, 2)), PagedSequenceMemory(5 + 2**32, 8, 7, (3, 1)))
    return PrefixSnapshot(24, 24, sequences, 4, (4, 0))


def test_a_shared_block_is_one_segment_and_a_cached_one_is_free():
    assert segments(shared_snapshot()) == [
        Segment(None, 0, 4, 0, cached=True), Segment(5 + 2**32, 4, 4, 3), Segment(5, 8, 4, 2),
        Segment(5, 12, 4, 4, ref_count=2), Segment(None, 16, 4, 0, cached=True), Segment(None, 20, 4, 0),
    ]  # fmt: skip
    both = SharedSnapshot(4, 1, (PagedSequenceMemory(0, 4, 2, (0,)), PagedSequenceMemory(1, 4, 3, (0,))), 4)
    assert segments(both) == [Segment(0, 0, 4, 3, ref_count=2)], "the one with more tokens counts"


def test_a_map_marks_what_is_shared_and_what_is_cached_in_words_hatches_and_numbers():
    figure = draw_memory_map(shared_snapshot())
    (ax,) = figure.axes
    assert texts(figure, "seq_id") == ["5.1", "5", "5 x2"]
    assert drawn_slots(ax, "shared") == [(0, x) for x in range(12, 16)]
    assert drawn_slots(ax, "cached") == [(0, x) for x in (0, 1, 2, 3, 16, 17, 18, 19)]
    assert set(drawn_slots(ax, "cached")) < set(drawn_slots(ax, "free"))
    hatches = [collection(ax, gid).get_hatch() for gid in ("shared", "cached", "held")]
    assert len({*hatches, None}) == 4
    assert "cached, of the free, 2 blocks · shared 1 blocks" in title(ax)
    assert [text.split(":")[0] for text in legend_labels(figure)] == [
        "used", "held, but unused", "free", "shared, xN", "cached",
    ]  # fmt: skip
    render(figure)
    strip = draw_film_strip([paged_snapshot(), shared_snapshot()])
    assert len(legend_labels(strip)) == 5, "one legend for all, with what any of them has"
    assert len(legend_labels(draw_film_strip([paged_snapshot()]))) == 3


def test_a_sequence_is_named_by_its_request_and_its_own_number():
    assert [label(i) for i in (0, 7, 7 + 2**32, 12 + 3 * 2**32)] == ["0", "7", "7.1", "12.3"]


@pytest.mark.parametrize("tables", [((0, 1), (1,)), ((0,), (3,))], ids=["twice", "outside"])
def test_books_that_do_not_balance_are_refused(tables):
    sequences = tuple(PagedSequenceMemory(i, 2 * len(t), 1, t) for i, t in enumerate(tables))
    with pytest.raises(ValueError, match="held twice, or not within 6 slots"):
        segments(PagedSnapshot(6, 1, sequences, 2))


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (12 << 30, "12 GiB"),
     (1 << 42, "4096 GiB")],
)  # fmt: skip
def test_bytes_are_written_in_the_largest_unit_that_fits(n, text):
    assert format_bytes(n) == text
    assert byte_unit(n)[0] <= max(n, 1)


# --- memory: figure ---


@settings(max_examples=30)
@given(manager=MEMORIES, steps=STEPS, slots_per_row=st.none() | st.integers(1, 70))
def test_the_map_draws_the_slots_that_the_books_count(manager, steps, slots_per_row):
    snapshot = fill(manager, steps)
    figure = draw_memory_map(snapshot, slots_per_row=slots_per_row)
    (ax,) = figure.axes
    counts = {"used": snapshot.used, "held": snapshot.held - snapshot.used, "free": snapshot.free}
    slots = {gid: drawn_slots(ax, gid) for gid in counts}
    assert {gid: len(found) for gid, found in slots.items()} == counts
    per_row = ax.get_xlim()[1]
    assert all(0 <= x < per_row for found in slots.values() for _, x in found), "cut where rows end"
    addresses = sorted(row * per_row + x for found in slots.values() for row, x in found)
    assert addresses == list(range(snapshot.num_slots)), "every slot is drawn once, and none outside"
    assert len(drawn_slots(ax, "outline")) == snapshot.held
    bottom, top = ax.get_ylim()
    assert all(top < row < bottom for found in slots.values() for row, _ in found)


def test_a_map_is_coloured_and_numbered_by_sequence_and_says_what_it_counts():
    figure = draw_memory_map(paged_snapshot(), title="six blocks")
    (ax,) = figure.axes
    assert [to_hex(c).upper() for c in collection(ax, "used").get_facecolor()] == [
        colour(i).upper() for i in (2, 9, 9)
    ]
    assert texts(figure, "seq_id") == ["2", "9", "9"]
    assert texts(figure, "title") == ["six blocks"]
    assert title(ax) == (
        "held 12 slots (288 bytes) · used 8 (192 bytes) · free 12 (288 bytes) "
        "· utilisation 67% of held, 33% of all"
    )
    assert ax.get_xlabel() == "block within its row (1 block = 4 slots)"
    assert collection(ax, "held").get_hatch(), "colour is not the only signal"
    assert legend_labels(figure) == ["used: holds a token", "held, but unused", "free"]


def test_addresses_of_row_and_column_add_up():
    (ax,) = draw_memory_map(paged_snapshot(), slots_per_row=7).axes
    assert ax.get_xlim()[1] == 8, "rounded up to whole blocks"
    assert ax.get_ylabel() == "first block\nof the row"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "2", "4"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "1"]


def test_what_the_naive_cache_and_recomputing_cannot_show_is_said():
    naive = NaiveManager(9, 24)
    naive.allocate(3, 4)
    (ax,) = draw_memory_map(naive.snapshot()).axes
    assert NOT_PHYSICAL in title(ax)
    figure = draw_memory_map(RecomputeManager(9, 24).snapshot())
    assert NOTHING in title(figure.axes[0])
    assert len(drawn_slots(figure.axes[0], "free")) == 9
    assert NOT_PHYSICAL not in title(draw_memory_map(paged_snapshot()).axes[0])


def test_the_longest_free_run_of_contiguous_memory_is_named():
    manager = ContiguousManager(13, 24, 4, "max")
    manager.allocate(0, 1)
    assert "longest free run 8" in title(draw_memory_map(manager.snapshot()).axes[0])


def test_a_film_strip_keeps_colours_and_scale():
    manager, snapshots = PagedManager(16, 4, 24), []
    for seq_id, n in ((0, 9), (8, 5), (5, 17), (8, 11)):
        manager.allocate(seq_id, n)
        snapshots.append(manager.snapshot())
    manager.free(0)
    snapshots.append(manager.snapshot())
    figure = draw_film_strip(snapshots, titles=[f"step {i}" for i in range(5)])
    maps = [ax for ax in figure.axes if ax.axison]
    assert texts(figure, "title") == [f"step {i}" for i in range(5)]
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in maps}) == 1
    for ax, snapshot in zip(maps, snapshots, strict=True):
        found = Counter(to_hex(c).upper() for c in collection(ax, "used").get_facecolor())
        assert found == Counter(colour(s.seq_id).upper() for s in snapshot.sequences for _ in s.block_ids)
    assert len(legend_labels(figure)) == 3, "one legend for all"
    render(figure)


def test_memories_of_different_kinds_and_sizes_are_drawn_at_one_scale():
    named: dict[str, KVManager] = {
        "contiguous": ContiguousManager(100, 24, 32),
        "paged": PagedManager(7, 9, 24),
    }
    for manager in named.values():
        manager.allocate(1, 10)
    figure = draw_memory_maps({name: manager.snapshot() for name, manager in named.items()})
    assert texts(figure, "title") == list(named)
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in figure.axes}) == 1
    assert figure.axes[0].get_xlim()[1] % 9 == 0
    assert [len(drawn_slots(ax, "used")) for ax in figure.axes] == [10, 10]
    assert len(drawn_slots(figure.axes[0], "held")) == 22


def test_a_map_goes_onto_an_axes_that_is_given():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert draw_memory_map(paged_snapshot(), ax=left) is figure
    assert len(drawn_slots(left, "used")) == 8
    assert not right.collections
    assert len(legend_labels(figure)) == 3


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 7), (512, 16), (983, 16), (1, 1), (3, 500)])
def test_small_and_large_pools_are_drawn_whole(num_blocks, block_size):
    manager = PagedManager(num_blocks, block_size, 46080)
    for seq_id in range(40):
        if manager.can_allocate(seq_id, 5 * seq_id + 1):
            manager.allocate(seq_id, 5 * seq_id + 1)
    figure = draw_memory_map(manager.snapshot())
    assert len(drawn_slots(figure.axes[0], "used")) == manager.snapshot().used
    assert all(float(t.get_fontsize()) >= 6 for t in figure.axes[0].texts)
    render(figure)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="0 titles for 0 snapshots"):
        draw_film_strip([])
    with pytest.raises(ValueError, match="0 titles for 0 snapshots"):
        draw_memory_maps({})
    with pytest.raises(ValueError, match="1 titles for 2 snapshots"):
        draw_film_strip([paged_snapshot()] * 2, titles=["one"])
    with pytest.raises(ValueError, match="without slots"):
        draw_memory_map(Snapshot(0, 24, ()))
    with pytest.raises(InvalidOption, match="slots_per_row=0"):
        draw_memory_map(paged_snapshot(), slots_per_row=0)
    with pytest.raises(ValueError, match="not within 3 slots"):
        draw_memory_map(Snapshot(3, 24, (SequenceMemory(0, 4, 4),)))


# --- steps ---


def step(index: int, *scheduled: tuple[int, ...], **more: Any) -> Step:
    """Steps last 3 ms, the next begins 1 ms later, and the clock stands at 70 s when the first begins."""
    start = 70 + 0.004 * index
    return Step(index, start, start + 0.003, tuple(ScheduledRequest(*s) for s in scheduled), **more)


def some_steps() -> list[Step]:
    """Request 5 prefills, 2 waits and prefills, 2 is preempted and computes its 4 tokens again, in pieces."""
    return [
        step(0, (5, 0, 6), waiting=(2,)),
        step(1, (5, 6, 1), waiting=(2,)),
        step(2, (5, 7, 1), (2, 0, 3)),
        step(3, (5, 8, 1), (2, 3, 1)),
        step(4, (5, 9, 1), preempted=(2,), waiting=(2,)),
        step(5, (2, 0, 3)),
        step(6, (2, 3, 1)),
        step(7, (2, 4, 1), (9, 0, 1)),
    ]


def test_a_timeline_tells_prefill_decode_and_recompute_apart():
    found = timeline(some_steps(), "step")
    assert found.request_ids == (5, 2, 9)
    assert [(b.kind, b.step) for b in found.bars if b.request_id == 2] == [
        ("prefill", 2), ("decode", 3), ("recompute", 5), ("recompute", 6), ("decode", 7),
    ]  # fmt: skip
    assert [b.kind for b in found.bars if b.request_id == 5] == ["prefill"] + ["decode"] * 4
    assert [b.kind for b in found.bars if b.request_id == 9] == ["prefill"], "a prompt of one token"
    assert [(b.start, b.end) for b in found.bars[:2]] == [(-0.5, 0.5), (0.5, 1.5)]
    assert found.preemptions == ((2, 3.5, False),)
    assert found.waits == ((2, -0.5, 1.5), (2, 3.5, 4.5)), "steps in a row are one line"


def test_a_timeline_by_time_starts_at_zero():
    found = timeline(some_steps())
    assert found.bars[1].start == pytest.approx(0.004)
    assert found.bars[1].end == pytest.approx(0.007)
    assert found.waits[0] == pytest.approx((2, 0, 0.007))
    assert found.preemptions[0] == pytest.approx((2, 0.016, False))


def test_chunks_of_a_prompt_are_prefill_to_the_last_and_a_hit_is_not_a_decode():
    steps = [
        step(0, (3, 0, 4, 0), waiting=(8,)),
        step(1, (3, 4, 1, 0), waiting=(8,)),
        step(2, (3, 5, 1, 1), (8, 16, 1, 1)),  # 8 has all but its last token from a prefix cache
        step(3, (3, 6, 1, 1), (8, 17, 1, 1)),
    ]
    assert [(b.request_id, b.kind) for b in timeline(steps).bars] == [
        (3, "prefill"), (3, "prefill"), (3, "prefill"), (8, "prefill"), (3, "decode"), (8, "decode"),
    ]  # fmt: skip
    assert [b.kind for b in timeline(steps[3:]).bars] == ["decode", "decode"], (
        "steps from the middle of a run"
    )


def group_steps(come_back: Sequence[tuple[int, ...]], num_swapped_out: int) -> list[Step]:
    """Request 4 asks for two samples, loses its memory with 7 and 7 tokens in it, and comes back."""
    return [
        step(0, (4, 0, 6, 2)),
        step(1, (4, 6, 1, 1, 0), (4, 6, 1, 1, 1)),
        step(2, preempted=(4,), waiting=(4,), num_swapped_out=num_swapped_out),
        step(3, *come_back),
        step(4, (4, 7, 1, 1, 0), (4, 7, 1, 1, 1)),
    ]


def test_the_sequences_of_a_request_are_one_line_with_one_bar_a_step():
    found = timeline(group_steps([(4, 0, 6, 0)], 0), "step")
    assert found.request_ids == (4,)
    assert [(b.kind, b.step) for b in found.bars] == [
        ("prefill", 0), ("decode", 1), ("recompute", 3), ("decode", 4),
    ]  # fmt: skip
    (ax,) = draw_timeline(group_steps([(4, 0, 6, 0)], 0)).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["4"]
    (ax,) = draw_timeline([step(0, (4, 0, 2), (4 + 2**32, 0, 2))]).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["4", "4.1"], "requests of their own"


def test_a_swap_is_told_apart_from_a_recompute():
    both = [(4, 7, 1, 1, 0), (4, 7, 1, 1, 1)]
    swapped = group_steps(both, num_swapped_out=3)
    assert timeline(swapped, "step").preemptions == ((4, 1.5, True),)
    assert {b.kind for b in timeline(swapped).bars} == {"prefill", "decode"}, "nothing is computed again"
    assert timeline(swapped[:3], "step").preemptions == ((4, 1.5, True),), "it has not come back"
    recomputed = group_steps([(4, 0, 6, 0)], num_swapped_out=3)  # the blocks were another's
    assert timeline(recomputed, "step").preemptions == ((4, 1.5, False),)
    assert timeline(group_steps(both, 0), "step").preemptions == ((4, 1.5, False),), "all found by prefix"
    figure = draw_timeline([*swapped, step(5, (9, 0, 2), preempted=(4,))])
    marks = {line.get_gid(): line.get_marker() for line in figure.axes[0].lines}
    assert marks == {"swapped out": "v", "preempted": "x"}
    assert legend_labels(figure)[-2:] == ["preempted", "swapped out"]
    render(figure)


def test_a_memory_that_keeps_nothing_recomputes_at_every_step():
    assert [b.kind for b in timeline([step(i, (0, 0, 4 + i)) for i in range(3)]).bars] == [
        "prefill", "recompute", "recompute",
    ]  # fmt: skip


@pytest.mark.parametrize(("by", "label"), [("time", "time since the first step (ms)"), ("step", "step")])
def test_the_timeline_draws_a_bar_per_request_and_step(by, label):
    steps = some_steps()
    figure = draw_timeline(steps, by=by)
    (ax,) = figure.axes
    drawn = {kind: collection(ax, kind).get_paths() for kind in KINDS}
    assert {kind: len(paths) for kind, paths in drawn.items()} == {"prefill": 3, "recompute": 2, "decode": 6}
    assert (ax.get_xlabel(), ax.get_ylabel()) == (label, "request id")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["5", "2", "9"]
    left, right = ax.get_xlim()
    x = np.concatenate([path.vertices[:, 0] for paths in drawn.values() for path in paths])
    assert left <= x.min() < x.max() <= right
    assert right == pytest.approx(31 if by == "time" else 7.5)
    heights = {kind: np.ptp(paths[0].vertices[:, 1]) for kind, paths in drawn.items()}
    assert heights["decode"] < heights["prefill"] == pytest.approx(heights["recompute"])
    assert collection(ax, "recompute").get_hatch(), "colour is not the only signal"
    cross: Any
    (cross,) = [line for line in ax.lines if line.get_gid() == "preempted"]
    assert (cross.get_marker(), list(cross.get_ydata())) == ("x", [1])
    assert list(cross.get_xdata()) == pytest.approx([16 if by == "time" else 3.5])
    assert [segment[:, 1].tolist() for segment in collection(ax, "waiting").get_segments()] == [
        [1, 1],
        [1, 1],
    ]
    assert [label.split(":")[0] for label in legend_labels(figure)] == [*KINDS, "waiting", "preempted"]
    render(figure)


def test_a_timeline_of_seconds_says_so():
    (ax,) = draw_timeline([step(0, (0, 0, 2)), step(999, (0, 2, 1))]).axes
    assert ax.get_xlabel() == "time since the first step (s)"
    assert ax.get_xlim()[1] == pytest.approx(3.999)


def test_in_a_large_timeline_bars_are_joined_and_cover_the_same_steps():
    steps = [
        step(
            k, *((i, 10 * (k > i) + k, 1 if k > i else 7) for i in range(64) if k >= i and k % 500 != i + 100)
        )
        for k in range(2000)
    ]
    figure = draw_timeline(steps, by="step")
    render(figure)
    assert len(figure.axes[0].collections) <= 4
    expected = Counter(b.kind for b in timeline(steps, "step").bars)
    for kind in ("prefill", "decode"):
        paths = collection(figure.axes[0], kind).get_paths()
        assert sum(np.ptp(path.vertices[:, 0]) for path in paths) == pytest.approx(expected[kind])
        assert len(paths) < 64 * 6


def test_a_timeline_that_shows_nothing_is_refused():
    with pytest.raises(ValueError, match="a step with a request"):
        draw_timeline([])
    with pytest.raises(ValueError, match="a step with a request"):
        draw_timeline([step(0)])
    with pytest.raises(InvalidOption, match="by='tokens'"):
        draw_timeline(some_steps(), by="tokens")
    render(draw_timeline([step(0, waiting=(3,))]))


def some_records() -> list[StepRecord]:
    """A memory of 24 slots of 1 KiB; the steps hold 4, 8, 8, ... slots."""
    manager, records = PagedManager(6, 4, 1024), []
    for n, at in enumerate(some_steps(), start=3):
        manager.allocate(5, n)
        records.append(StepRecord(at, manager.snapshot()))
    return records


def test_utilisation_shows_what_the_snapshots_count():
    records = some_records()
    figure = draw_utilisation(records)
    upper, lower = figure.axes
    patches: list[Any] = [patch for ax in figure.axes for patch in ax.patches]
    data = {patch.get_gid(): patch.get_data() for patch in patches}
    assert data["held"].values == pytest.approx([4, 4, 8, 8, 8, 8, 12, 12])
    assert data["used"].values == pytest.approx([3, 4, 5, 6, 7, 8, 9, 10])
    assert data["budget"].values == pytest.approx([24] * 8)
    assert data["running"].values == pytest.approx([1, 1, 2, 2, 1, 1, 1, 2])
    assert data["waiting"].values == pytest.approx([1, 1, 0, 0, 1, 0, 0, 0])
    for found in data.values():
        assert found.edges == pytest.approx([0, 4, 8, 12, 16, 20, 24, 28, 31])
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("KV memory (KiB)", "requests")
    assert lower.get_xlabel() == "time since the first step (ms)"
    assert legend_labels(figure) == ["budget", "held", "used", "running", "waiting"]
    assert upper.get_ylim()[1] > 24
    render(figure)


def test_utilisation_goes_onto_an_axes_that_is_given():
    figure = Figure(figsize=(8, 8), layout="constrained")
    above, below = figure.subplots(2, 1)
    assert draw_timeline(some_steps(), ax=above) is figure
    assert draw_utilisation(some_records(), ax=below) is figure
    assert len(figure.axes) == 3
    render(figure)
    with pytest.raises(ValueError, match="must come from subplots"):
        draw_utilisation(some_records(), ax=Figure().add_axes((0, 0, 1, 1)))


def test_utilisation_of_nothing_is_refused_and_of_one_step_drawn():
    with pytest.raises(ValueError, match="at least one record"):
        draw_utilisation([])
    render(draw_utilisation(some_records()[:1]))
    still = StepRecord(Step(0, 5.0, 5.0, ()), Snapshot(4, 24, ()))
    render(draw_utilisation([still]))


# --- modules ---


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_drawing_loads_neither_pyplot_nor_torch():
    names = "[name for name in ('matplotlib.pyplot', 'torch') if name in sys.modules]"
    modules = ", ".join(
        f"minivllm.lab.{name}" for name in ("draw", "draw_steps", "draw_results", "draw_roof")
    )
    assert run_python(f"import sys, {modules}; print({names})") == "[]\n"


@pytest.mark.parametrize("module", ["draw", "draw_steps", "draw_results", "draw_roof", "sliding"])
def test_without_matplotlib_the_error_says_what_to_install(module):
    code = f"""
import sys
sys.modules["matplotlib"] = None
import minivllm.lab.record
from minivllm.errors import MinivllmError
try:
    import minivllm.lab.{module}
except MinivllmError as error:
    print(error)
"""
    assert 'pip install "minivllm[lab]"' in run_python(code)


def test_colours_differ_until_the_palette_begins_again():
    assert len({c.upper() for c in PALETTE}) == len(PALETTE)
    assert [colour(i) for i in (0, 8, 13, 14)] == [PALETTE[i] for i in (0, 1, 6, 0)]


def test_pictures_come_from_the_lab_by_name():
    from minivllm import lab

    assert lab.draw_memory_map is draw_memory_map
    assert lab.draw_timeline is draw_timeline
    assert all(name in dir(lab) and getattr(lab, name) for name in lab.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        lab.nonsense  # noqa: B018


def paged_snapshots(n: int) -> list[Snapshot]:
    manager = PagedManager(num_blocks=5, block_size=4, bytes_per_token=8)
    found: list[Snapshot] = []
    for i in range(n):
        manager.allocate(0, 3 * i + 1)
        found.append(manager.snapshot())
    return found


@pytest.mark.parametrize("columns", [0, -1, 2.5, True, "2", 2**30], ids=str)
def test_a_number_of_columns_that_is_none_is_refused(columns):
    with pytest.raises(InvalidOption, match="columns="):
        draw_film_strip(paged_snapshots(3), columns=columns)


@pytest.mark.parametrize("slots", [0, 2.5, "a", False], ids=str)
def test_a_number_of_slots_that_is_none_is_refused(slots):
    with pytest.raises(InvalidOption, match="slots_per_row="):
        draw_memory_map(paged_snapshots(1)[0], slots_per_row=slots)


def test_more_columns_than_pictures_are_as_many_as_pictures():
    figure = draw_film_strip(paged_snapshots(2), columns=100)
    render(figure)
    assert len(figure.axes) == 2


def test_a_title_is_text_and_no_formula():
    figure = draw_memory_map(paged_snapshots(1)[0], title="$x_{$ costs $2")
    render(figure)
    assert "$x_{$ costs $2" in [text.get_text() for text in figure.axes[0].texts]


def test_what_is_drawn_may_come_from_a_generator():
    steps = [step(0, (0, 0, 2)), step(1, (0, 2, 1))]
    records = [StepRecord(s, snapshot) for s, snapshot in zip(steps, paged_snapshots(2), strict=True)]
    figures = (
        draw_timeline(s for s in steps),
        draw_film_strip(record.snapshot for record in records),
        draw_utilisation(record for record in records),
    )
    for figure, axes in zip(figures, (1, 2, 2), strict=True):
        render(figure)
        assert len(figure.axes) == axes


def test_a_step_in_which_all_were_preempted_has_a_timeline():
    figure = draw_timeline([Step(0, 0.0, 1.0, (), (3,), ())])
    render(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["3"]
