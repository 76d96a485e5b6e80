"""Above the chapters: a KV memory as plain data to draw: every slot once, in order of address."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from minivllm.memory.contiguous import ContiguousSnapshot
from minivllm.memory.manager import Snapshot
from minivllm.memory.paged import PagedSnapshot
from minivllm.memory.prefix_cache import PrefixSnapshot
from minivllm.memory.sharing import SharedSnapshot

# Okabe and Ito's palette without black: colours that colour-blind readers can tell apart.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")


@dataclass(frozen=True)
class Segment:
    """Slots start to start + length - 1: all of one sequence, or all free (seq_id None).

    The first `used` of them hold tokens. ref_count: sequences that have them, of which seq_id came first.
    cached: free slots whose old contents a prefix cache can still find.
    """

    seq_id: int | None
    start: int
    length: int
    used: int
    ref_count: int = 1
    cached: bool = False


def segments(snapshot: Snapshot) -> list[Segment]:
    """Every slot of a memory exactly once, in order of address: a segment per block, run or free gap.

    A plain Snapshot knows no addresses: its sequences stand side by side in the order given. A block that
    several sequences share is one segment. Raises ValueError where a slot lies outside the memory, or is held
    twice in a memory that cannot share.
    """
    found: list[Segment] = []
    at, gap = 0, snapshot.block_size if isinstance(snapshot, PagedSnapshot) else max(1, snapshot.num_slots)
    for taken in [*sorted(_taken(snapshot), key=lambda s: s.start), Segment(None, snapshot.num_slots, 0, 0)]:
        if taken.start < at or taken.start + taken.length > snapshot.num_slots:
            raise ValueError(f"{taken} is held twice, or not within {snapshot.num_slots} slots.")
        found += [Segment(None, i, min(gap, taken.start - i), 0) for i in range(at, taken.start, gap)]
        found += [taken] if taken.length else []
        at = taken.start + taken.length
    return found


def _taken(snapshot: Snapshot) -> Iterator[Segment]:
    if isinstance(snapshot, SharedSnapshot):
        yield from _shared(snapshot)
    elif isinstance(snapshot, PagedSnapshot):
        size = snapshot.block_size
        for paged in snapshot.sequences:
            for i, block in enumerate(paged.block_ids):
                yield Segment(paged.seq_id, block * size, size, min(size, max(0, paged.used - i * size)))
    elif isinstance(snapshot, ContiguousSnapshot):
        for run in snapshot.sequences:
            yield Segment(run.seq_id, run.start, run.held, run.used)
    else:
        start = 0
        for sequence in snapshot.sequences:
            yield Segment(sequence.seq_id, start, sequence.held, sequence.used)
            start += sequence.held


def _shared(snapshot: SharedSnapshot) -> Iterator[Segment]:
    """Each block in use once, as its first holder's, with the most tokens that a holder has in it; then the
    cached ones."""
    size, count = snapshot.block_size, snapshot.ref_count
    found: dict[int, Segment] = {}
    for s in snapshot.sequences:
        for i, block in enumerate(s.block_ids):
            used = min(size, max(0, s.used - i * size))
            first = found.get(block, Segment(s.seq_id, block * size, size, used, count[block]))
            found[block] = replace(first, used=max(used, first.used))
    yield from found.values()
    for block in snapshot.cached if isinstance(snapshot, PrefixSnapshot) else ():
        yield Segment(None, block * size, size, 0, cached=True)


def colour(seq_id: int) -> str:
    """The colour of a sequence or request, the same in every picture."""
    return PALETTE[seq_id % len(PALETTE)]


def label(seq_id: int) -> str:
    """A sequence by its request's id and, from the second on, its own number: "5", "5.1", "5.2"."""
    branch, request_id = divmod(seq_id, 2**32)
    return f"{request_id}.{branch}" if branch else str(request_id)


def byte_unit(n: float) -> tuple[int, str]:
    """The largest binary unit that is not above n bytes: (its bytes, its name)."""
    power = min(3, max(0, math.frexp(n)[1] - 1) // 10)
    return 1 << (10 * power), ("bytes", "KiB", "MiB", "GiB")[power]


def format_bytes(n: int) -> str:
    """Three digits and a unit: 1536 -> 1.5 KiB."""
    size, unit = byte_unit(n)
    return f"{n / size:.3g} {unit}" if n < 1000 * size else f"{n / size:.0f} {unit}"
