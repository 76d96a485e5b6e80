"""Above the chapters: what an engine tells of a step, for those who measure and draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ScheduledRequest(NamedTuple):
    """A sequence's part in one step: it had num_computed_tokens in memory and computes num_new_tokens.

    num_sampled: tokens that came of it: 0 for a chunk of a prompt, n where a group parts. branch: which of
    the request's sequences it is, in the order in which they came into being.
    """

    request_id: int
    num_computed_tokens: int
    num_new_tokens: int
    num_sampled: int = 1
    branch: int = 0


@dataclass(frozen=True)
class Step:
    """What one step did; start and end in seconds on the engine's clock.

    scheduled: who took part, in batch order. preempted: ids that lost their memory in this step.
    waiting: ids that had to wait, in the order of the queue. num_swapped_out, num_swapped_in, num_copied:
    blocks that were moved to the CPU, back, and copied before a write.
    """

    index: int
    start: float
    end: float
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_copied: int = 0

    @property
    def num_sampled(self) -> int:
        """Output tokens that came of the step."""
        return sum(part.num_sampled for part in self.scheduled)
