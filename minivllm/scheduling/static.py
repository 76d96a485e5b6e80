"""Chapter 6: static batching: a batch is closed until its last member ends.

The baseline. A short request's place stands empty until the longest of its batch is done, and whoever
arrives waits for the whole batch.
"""

from __future__ import annotations

from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.request import Request


class StaticScheduler(ContinuousScheduler):
    """As continuous batching, but requests are admitted only while a new batch is made up.

    A victim of preemption heads the next batch.
    """

    def _plan(self, output: SchedulerOutput) -> None:
        self._open = not self.running  # a new batch begins when the one before has ended
        super()._plan(output)

    def _take_in(self, request: Request) -> bool:
        return self._open and super()._take_in(request)
