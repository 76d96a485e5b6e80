"""Chapter 6: continuous batching: who takes part is decided anew at every step.

A request joins as soon as there is room and leaves as soon as it is done; nobody waits for a batch to
end (Orca, OSDI '22, calls this iteration-level scheduling). Each step, in this order:

1. Every running request gets what it lacks, one token as a rule. Where memory is full, the request that
   started last (or, by priority, the least urgent) gives up its memory and waits at the head of the queue:
   the tokens it has generated are kept. It begins again from its first token, or its blocks are swapped out.
2. If nobody had to give up, waiting requests are admitted, in their order, while there is room.
   A watermark is left free, or the next step would have to take back what this one gave.

Without preemption two growing requests could each hold the blocks that the other needs, for ever.
Nothing here touches a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many

from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.memory.manager import KVManager
from minivllm.memory.swap import SwapSpace
from minivllm.scheduling.groups import fork_all, may_fork, take_beams, take_tokens
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.queue import POLICIES, rank
from minivllm.scheduling.request import Request, Status
from minivllm.scheduling.request_memory import RequestMemory
from minivllm.scheduling.sequence import Sequence


class ContinuousScheduler:
    """At most max_num_seqs sequences at once.

    watermark: slots to leave free at admission. policy: "fcfs", first come first served, or "priority".
    swap_space: where the blocks of a preempted request go; None: it computes them again.

    Invariant: running requests have room for all their tokens, and stand in the order of admission; waiting
    ones hold no memory, or all of it in the swap space.
    """

    def __init__(
        self,
        manager: KVManager,
        max_num_seqs: int,
        watermark: int = 0,
        *,
        policy: str = "fcfs",
        swap_space: SwapSpace | None = None,
    ):
        if max_num_seqs < 1:
            raise InvalidOption(f"max_num_seqs={max_num_seqs} is not possible: it must be at least 1.")
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.watermark = watermark
        self.policy = policy
        self.memory = RequestMemory(manager, swap_space)
        self.waiting = POLICIES[policy]()
        self.running: list[Request] = []
        self._num_arrived = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong for one that could never fit, even alone."""
        self.check(request)
        self.memory.expect(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raises InvalidOption or RequestTooLong for a request that could never run, even alone."""
        width = request.width
        if width > 1 and self.memory.sharing is None:
            raise InvalidOption(
                f"A request of {width} sequences needs a memory whose blocks can be shared: cache='paged'. "
                "Send one request for each."
            )
        if width > self.max_num_seqs:
            raise InvalidOption(
                f"The request has {width} sequences (n or beam_width), which run together, and "
                f"max_num_seqs={self.max_num_seqs}. Ask for fewer, or raise max_num_seqs."
            )
        if not self.memory.fits_ever(request):
            each = f"{width} sequences of {request.longest}" if width > 1 else f"{request.longest}"
            raise RequestTooLong(
                f"The request may need {each} tokens in memory ({len(request.prompt_token_ids)} "
                f"of prompt, max_tokens={request.max_tokens}); the memory never holds so many for one. "
                "Shorten the prompt, lower max_tokens, or give it more."
            )

    def schedule(self) -> SchedulerOutput:
        """Plan one step, and take the memory that it needs."""
        output = SchedulerOutput()
        self._plan(output)
        if self.memory.sharing is not None:
            output.block_copies = self.memory.sharing.take_copies()
        if self.memory.swap_space is not None:
            output.swap_out, output.swap_in = self.memory.swap_space.take_transfers()
            self.memory.counters.num_swapped_out_blocks += len(output.swap_out)
            self.memory.counters.num_swapped_in_blocks += len(output.swap_in)
        return output

    def update(
        self,
        output: SchedulerOutput,
        tokens: dict[int, int],
        beams: dict[int, list[tuple[int, int]]] | None = None,
    ) -> list[Request]:
        """Take what a step gave; returns the requests that end with it.

        tokens: the next token by sequence id. beams: for beam searches, by request id, what
        `advance` of `decoding/beam_search.py` gave.
        """
        sampled: dict[Request, list[Sequence]] = {}
        for request, sequence, num_new, samples in output.scheduled:
            if request.status is Status.FINISHED:
                continue  # aborted since the step was planned
            computed = sequence.num_computed_tokens
            if sequence.num_recomputed_to > computed:
                again = min(sequence.num_recomputed_to - computed, num_new)
                self.memory.counters.num_recomputed_tokens += again
            sequence.num_computed_tokens += num_new
            sampled.setdefault(request, []).extend(samples)
        for request, sequences in sampled.items():
            self.memory.computed(request)
            if request.search is None:
                take_tokens(self.memory, request, {s: tokens[s.seq_id] for s in sequences})
            elif sequences:
                take_beams(self.memory, request, (beams or {})[request.request_id])
            elif may_fork(request):  # a search that begins again
                fork_all(self.memory, request, request.first)
        finished = [request for request in sampled if request.status is Status.FINISHED]
        if finished:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
        return finished

    def finish(
        self,
        request: Request,
        reason: str,
        stop_reason: int | str | None = None,
        sequence: Sequence | None = None,
    ) -> None:
        """End a request from outside, wherever it stands, or one sequence of it; what has ended stays so."""
        if request.status is Status.FINISHED or (sequence and sequence.finish_reason is not None):
            return
        if sequence is not None and len(request.live) > 1:
            if not request.forked and sequence is request.first and request.status is Status.RUNNING:
                self.memory.fork(request, sequence, request.live[1])  # another stands for all from now on
            self.memory.free(sequence)
            request.finish_sequence(sequence, reason, stop_reason)
            if not request.forked and request.status is Status.RUNNING:
                self.memory.promise(request)
            elif not request.forked:
                self.memory.release(request)
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        for holder in request.live:
            self.memory.free(holder)
        request.finish(reason, stop_reason)

    def abort(self, request: Request) -> None:
        """End a request that nobody waits for any more."""
        self.finish(request, "abort")

    def take_back(self, output: SchedulerOutput | None = None) -> None:
        """A step has failed: all running requests give up their memory and wait, in the order they had.

        What the failed step should have swapped out is taken for lost.
        """
        for request in output.preempted if output is not None else ():
            if request.status is Status.WAITING:
                self.memory.release(request)
        while self.running:
            request = self.running.pop()
            self.memory.release(request)
            request.status = Status.WAITING
            self.waiting.appendleft(request)

    def has_unfinished(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def _plan(self, output: SchedulerOutput) -> None:
        self._continue(self.running, output)
        self._admit(output)

    def _continue(self, requests: Many[Request], output: SchedulerOutput) -> None:
        """Let running requests go on."""
        # Over a copy: making room for one request takes others off the list, and these wait then.
        for request in list(requests) if self.policy == "fcfs" else sorted(requests, key=rank):
            if request.status is Status.RUNNING:
                parts = self._parts(request, self._limit(request, output))
                if parts and self._make_room(request, parts, output):
                    output.grant(request, parts)

    def _admit(self, output: SchedulerOutput) -> None:
        """Let waiting requests begin, as long as nobody had to give way."""
        num_seqs = sum(request.num_seqs for request in self.running)
        while self.waiting and not output.preempted:
            request = self.waiting[0]
            num_seqs += request.num_seqs
            limit = self._limit(request, output)
            if num_seqs > self.max_num_seqs or limit < 1 or not self._take_in(request):
                break
            self.waiting.popleft()
            request.status = Status.RUNNING
            self.running.append(request)
            parts = self._parts(request, limit)
            room = self.memory.grow(request, parts)
            assert room, "admission has counted what the first step needs"
            output.grant(request, parts)

    def _parts(self, request: Request, limit: int) -> list[tuple[Sequence, int]]:
        """How many tokens each sequence of a request computes in this step, at most `limit` in all."""
        missing = request.missing()
        if sum([n for _, n in missing]) <= limit:
            return missing
        parts = []
        for sequence, n in missing:
            # A group samples together or not at all: until it can, each sequence leaves its last token.
            n = min(n - (len(missing) > 1), limit)
            if n > 0:
                parts.append((sequence, n))
                limit -= n
        return parts

    def _limit(self, request: Request, output: SchedulerOutput) -> int:
        """Most tokens that a request may compute in this step: here there is no limit."""
        return sys.maxsize

    def _make_room(
        self, request: Request, parts: Many[tuple[Sequence, int]], output: SchedulerOutput
    ) -> bool:
        """Preempt others until the request's tokens fit; False when it was itself the one to give way."""
        while not self.memory.grow(request, parts):
            victim = self.running[-1] if self.policy == "fcfs" else max(self.running, key=rank)
            self.running.remove(victim)
            output.take_back(victim)
            output.preempted.append(victim)
            self.memory.preempt(victim)
            victim.status = Status.WAITING
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _take_in(self, request: Request) -> bool:
        """Take memory for a waiting request; False where there is too little."""
        spare = self.watermark if self.running else 0  # alone, a request may have everything
        return self.memory.admit(request, spare)
