"""Chapter 6: a scheduler's plan for one step: who computes how many tokens, and which blocks move before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from minivllm.scheduling.request import Request
from minivllm.scheduling.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence's part in a step. samples: the sequences whose next token its last row of logits gives."""

    request: Request
    sequence: Sequence
    num_new_tokens: int
    samples: tuple[Sequence, ...]

    def new_token_ids(self) -> array[int]:
        """The tokens to compute."""
        start = self.sequence.num_computed_tokens
        return self.sequence.token_ids[start : start + self.num_new_tokens]


@dataclass
class SchedulerOutput:
    """One step's plan: who computes what, in batch order; who lost its memory; which blocks move before.

    Blocks move in this order: swap_out (device block, CPU block), swap_in (CPU block, device block),
    block_copies (block read, block written).
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    def grant(self, request: Request, parts: Many[tuple[Sequence, int]]) -> None:
        """A request takes part. Those of its sequences that lack nothing afterwards get their next token."""
        for sequence, num_new in parts:
            samples: tuple[Sequence, ...] = ()
            if sequence.num_computed_tokens + num_new == len(sequence.token_ids):
                samples = tuple(request.live) if request.samples_together else (sequence,)
            self.scheduled.append(ScheduledSequence(request, sequence, num_new, samples))
            self.num_tokens += num_new

    def take_back(self, request: Request) -> None:
        """A request takes no part after all; its tokens are there for others."""
        self.num_tokens -= sum(part.num_new_tokens for part in self.scheduled if part.request is request)
        self.scheduled = [part for part in self.scheduled if part.request is not request]
