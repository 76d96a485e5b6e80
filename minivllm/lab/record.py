"""Above the chapters: what an engine did, step by step, kept for tables and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.memory.manager import KVManager, Snapshot

if TYPE_CHECKING:
    from minivllm.step import Step


def in_flight(step: Step) -> int:
    """Sequences that took part in a step. A group's prompt is computed by one, which counts as n in the step
    in which n first tokens come of it."""
    return sum(max(1, part.num_sampled) for part in step.scheduled)


@dataclass(frozen=True)
class StepRecord:
    """One step, and the memory while it was computed: after it was allocated, before the finished left."""

    step: Step
    snapshot: Snapshot


@dataclass
class Recorder:
    """Give it to an engine as `on_step`; it keeps a record of every step."""

    manager: KVManager
    records: list[StepRecord] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        self.records.append(StepRecord(step, self.manager.snapshot()))
