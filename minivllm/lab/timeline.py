"""Above the chapters: steps as plain data to draw: who computed what when, who waited, who was preempted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from minivllm.errors import InvalidOption

if TYPE_CHECKING:
    from minivllm.engine import Step


class Bar(NamedTuple):
    """One request's part in step number `step`, from start to end; kind: prefill, recompute or
    decode."""

    request_id: int
    kind: str
    step: int
    start: float
    end: float


class Wait(NamedTuple):
    """Steps in a row in which a request had to wait: the start of the first to the end of the last."""

    request_id: int
    start: float
    end: float


class Preemption(NamedTuple):
    """A request lost its memory in the step that began then."""

    request_id: int
    start: float


@dataclass(frozen=True)
class Timeline:
    """What is drawn of some steps. request_ids: in order of first appearance."""

    request_ids: tuple[int, ...]
    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    preemptions: tuple[Preemption, ...]


def timeline(steps: Iterable[Step], by: str = "time") -> Timeline:
    """Lay steps out by time, in seconds since the first began, or by step: number i is i - 0.5 to i + 0.5.

    A bar is a recompute while the request has fewer tokens in memory than it once had: it was preempted,
    or the memory keeps nothing. Raises InvalidOption for another `by`.
    """
    if by not in ("time", "step"):
        raise InvalidOption(f"by={by!r} is not possible: it must be 'time' or 'step'.")
    steps = list(steps)
    seen: dict[int, None] = {}
    reached: dict[int, int] = {}  # tokens in memory after the latest step
    lost: dict[int, int] = {}  # tokens in memory before it was lost
    bars, waits, preemptions = [], [], []
    open_waits: dict[int, Wait] = {}
    for step in steps:
        start, end = step.index - 0.5, step.index + 0.5
        if by == "time":
            start, end = step.start - steps[0].start, step.end - steps[0].start
        for i in step.preempted:
            lost[i] = max(lost.get(i, 0), reached.get(i, 0))
            preemptions.append(Preemption(i, start))
        for i, num_computed, num_new in step.scheduled:
            if num_computed == 0:
                lost[i] = max(lost.get(i, 0), reached.get(i, 0))
            reached[i] = num_computed + num_new
            kind = "prefill" if num_new > 1 or num_computed == 0 else "decode"
            bars.append(
                Bar(i, "recompute" if num_computed < lost.get(i, 0) else kind, step.index, start, end)
            )
        before = open_waits
        open_waits = {i: Wait(i, before[i].start if i in before else start, end) for i in step.waiting}
        waits += [wait for i, wait in before.items() if i not in open_waits]
        seen |= dict.fromkeys([*(r.request_id for r in step.scheduled), *step.preempted, *step.waiting])
    return Timeline(tuple(seen), tuple(bars), (*waits, *open_waits.values()), tuple(preemptions))
