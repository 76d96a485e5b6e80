"""Above the chapters: steps as plain data to draw: who computed what when, who waited, who was preempted.

A request has one line, however many sequences answer it. One of 6 prompt tokens and n = 4:

    step                 0         1         2        3        4            5
    sequence 0           4 tokens  2 tokens  1 token  -        1 token      7 tokens
    sequences 1, 2, 3                        1 each   -        1 each       1 each, after it
    line                 prefill   prefill   decode   waits    decode   or  recompute
                                             preempted         swapped      not swapped
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from minivllm.errors import InvalidOption

if TYPE_CHECKING:
    from minivllm.step import ScheduledRequest, Step


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
    """A request lost its memory in the step that began then; swapped: its blocks were kept on the CPU."""

    request_id: int
    start: float
    swapped: bool = False


@dataclass(frozen=True)
class Timeline:
    """What is drawn of some steps. request_ids: in order of first appearance."""

    request_ids: tuple[int, ...]
    bars: tuple[Bar, ...]
    waits: tuple[Wait, ...]
    preemptions: tuple[Preemption, ...]


class _Progress:
    """How far each sequence has come, (request id, branch), and so what a part in a step is."""

    def __init__(self) -> None:
        self.reached: dict[tuple[int, int], int] = {}  # tokens in memory after the latest step
        self.lost: dict[tuple[int, int], int] = {}  # tokens in memory before it was lost
        self.prefilling: dict[int, bool] = {}  # whether a request's first token is still to come

    def lose(self, request_id: int) -> None:
        for key in [key for key in self.reached if key[0] == request_id]:
            self.lost[key] = max(self.lost.get(key, 0), self.reached[key])

    def take(self, part: ScheduledRequest, begun: bool) -> str:
        """The kind of a part. begun: a request that is seen for the first time may have begun before."""
        i, num_computed, num_new, num_sampled, branch = part
        if num_computed == 0:
            self.lose(i)
        prefilling = self.prefilling.setdefault(i, num_computed == 0 or num_new > 1 or not begun)
        self.prefilling[i] = prefilling and num_sampled == 0
        self.reached[i, branch] = num_computed + num_new
        if num_computed < self.lost.get((i, branch), 0):
            return "recompute"
        return "prefill" if prefilling or num_new > 1 else "decode"


def timeline(steps: Iterable[Step], by: str = "time") -> Timeline:
    """Lay steps out by time, in seconds since the first began, or by step: number i is i - 0.5 to i + 0.5.

    A bar is a recompute while a sequence of the request has fewer tokens in memory than it once had: it was
    preempted, or the memory keeps nothing. A preemption was a swap where blocks were copied out in its step
    and the request came back with all it had, or has not come back. Raises InvalidOption for another `by`.
    """
    if by not in ("time", "step"):
        raise InvalidOption(f"by={by!r} is not possible: it must be 'time' or 'step'.")
    steps = list(steps)
    seen: dict[int, None] = {}
    progress = _Progress()
    bars, waits = [], []
    preemptions: list[Preemption] = []
    open_waits: dict[int, Wait] = {}
    out: dict[int, int] = {}  # request id -> place of a preemption that was a swap so far
    for number, step in enumerate(steps):
        start, end = step.index - 0.5, step.index + 0.5
        if by == "time":
            start, end = step.start - steps[0].start, step.end - steps[0].start
        for i in step.preempted:
            progress.lose(i)
            out[i] = len(preemptions)
            preemptions.append(Preemption(i, start, step.num_swapped_out > 0))
        kinds: dict[int, set[str]] = {}
        for part in step.scheduled:
            i = part.request_id
            kinds.setdefault(i, set()).add(progress.take(part, begun=number == 0))
            back = out.get(i)
            if back is not None and part.num_computed_tokens < progress.lost.get((i, part.branch), 0):
                preemptions[back] = preemptions[back]._replace(swapped=False)
        for i, found in kinds.items():
            out.pop(i, None)
            kind = next(kind for kind in ("recompute", "prefill", "decode") if kind in found)
            bars.append(Bar(i, kind, step.index, start, end))
        before = open_waits
        open_waits = {i: Wait(i, before[i].start if i in before else start, end) for i in step.waiting}
        waits += [wait for i, wait in before.items() if i not in open_waits]
        seen |= dict.fromkeys([*(r.request_id for r in step.scheduled), *step.preempted, *step.waiting])
    return Timeline(tuple(seen), tuple(bars), (*waits, *open_waits.values()), tuple(preemptions))
