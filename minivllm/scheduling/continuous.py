"""Chapter 6: continuous batching: who takes part is decided anew at every step.

A request joins as soon as there is room and leaves as soon as it is done; nobody waits for a batch to
end (Orca, OSDI '22, calls this iteration-level scheduling). Each step, in this order:

1. Every running request gets what it lacks, one token as a rule. Where memory is full, the request that
   started last gives up its memory and waits at the head of the queue, to begin again from its first
   token: the tokens it has generated are kept and become part of what it computes.
2. If nobody had to give up, waiting requests are admitted, first come first served, while there is room.
   A watermark is left free, or the next step would have to take back what this one gave.

Without preemption two growing requests could each hold the blocks that the other needs, for ever.
Nothing here touches a tensor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.memory.manager import KVManager
from minivllm.scheduling.request import Request, Status


@dataclass
class SchedulerOutput:
    """One step's plan: (request, number of new tokens) in batch order, and who lost its memory."""

    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class ContinuousScheduler:
    """First come, first served, at most max_num_seqs at once. watermark: slots to leave free at admission.

    Invariant: running requests have room for all their tokens; waiting ones hold no memory; both lists
    are in order of arrival.
    """

    def __init__(self, manager: KVManager, max_num_seqs: int, watermark: int = 0):
        if max_num_seqs < 1:
            raise InvalidOption(f"max_num_seqs={max_num_seqs} is not possible: it must be at least 1.")
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.watermark = watermark
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong for one that could never fit, even alone."""
        self.check(request)
        self._expect(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raises RequestTooLong for a request that could never fit, even alone."""
        if not self.manager.fits_ever(request.longest):
            raise RequestTooLong(
                f"The request may need {request.longest} tokens in memory ({len(request.prompt_token_ids)} "
                f"of prompt, max_tokens={request.max_tokens}); the memory never holds so many for one. "
                "Shorten the prompt, lower max_tokens, or give it more."
            )

    def schedule(self) -> SchedulerOutput:
        """Plan one step, and take the memory that it needs."""
        output = SchedulerOutput()
        # Over a copy: making room for one request takes others off the end of the list, and these wait then.
        for request in list(self.running):
            if request.status is Status.RUNNING and self._make_room(request, output):
                self._grant(request, output)
        while self.waiting and not output.preempted and self._may_admit(self.waiting[0]):
            request = self.waiting.popleft()
            request.status = Status.RUNNING
            self.running.append(request)
            self._grant(request, output)
        return output

    def update(self, output: SchedulerOutput, tokens: dict[int, int]) -> list[Request]:
        """Take the tokens sampled for a step, by request id; returns the requests that end with them."""
        finished: list[Request] = []
        for request, num_new in output.scheduled:
            if request.status is not Status.RUNNING:
                continue  # aborted since the step was planned
            request.num_computed_tokens += num_new
            request.append(tokens[request.request_id])
            if request.finish_reason is not None:
                self.manager.free(request.request_id)
                finished.append(request)
        if finished:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
        return finished

    def finish(self, request: Request, reason: str, stop_reason: str | None = None) -> None:
        """End a request from outside, wherever it stands; one that has ended stays as it is."""
        if request.status is Status.FINISHED:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self.manager.free(request.request_id)
        request.finish(reason, stop_reason)

    def abort(self, request: Request) -> None:
        """End a request that nobody waits for any more."""
        self.finish(request, "abort")

    def take_back(self) -> None:
        """A step has failed: all running requests give up their memory and wait, in the order they had."""
        while self.running:
            self._back_to_waiting()

    def has_unfinished(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def _make_room(self, request: Request, output: SchedulerOutput) -> bool:
        """Preempt from the end until the request's tokens fit; False when it was itself the last."""
        while not self.manager.can_allocate(request.request_id, request.num_tokens):
            victim = self._back_to_waiting()
            victim.num_preemptions += 1
            output.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _back_to_waiting(self) -> Request:
        """The request that started last gives up its memory and heads the queue."""
        victim = self.running.pop()
        self.manager.free(victim.request_id)
        victim.status, victim.num_computed_tokens = Status.WAITING, 0
        self._expect(victim)
        self.waiting.appendleft(victim)
        return victim

    def _expect(self, request: Request) -> None:
        self.manager.expect(request.request_id, len(request.prompt_token_ids), request.max_tokens - 1)

    def _may_admit(self, request: Request) -> bool:
        if len(self.running) >= self.max_num_seqs:
            return False
        spare = self.watermark if self.running else 0  # alone, a request may have everything
        return self.manager.can_allocate(request.request_id, request.num_tokens + spare)

    def _grant(self, request: Request, output: SchedulerOutput) -> None:
        self.manager.allocate(request.request_id, request.num_tokens)
        output.scheduled.append((request, request.num_tokens - request.num_computed_tokens))
