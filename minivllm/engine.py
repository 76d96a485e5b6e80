"""Above the chapters: the engine: one loop that joins scheduler, memory, model and sampler.

It is handed its parts and chooses none (`llm.py` does). A step is: plan, pack, place, compute, sample,
take the tokens. It prints nothing, measures nothing and draws nothing: after each step it tells
`on_step` what was done, and `lab` keeps what it wants of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.decoding.penalties import adjust
from minivllm.decoding.sampler import sample, top_logprobs
from minivllm.errors import EngineBusy, InvalidLogits, OutOfMemory
from minivllm.interrupt import Shield
from minivllm.memory.manager import KVManager
from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.scheduling.continuous import ContinuousScheduler, SchedulerOutput
from minivllm.scheduling.request import Request


class ScheduledRequest(NamedTuple):
    """A request's part in one step: it had num_computed_tokens in memory and computes num_new_tokens."""

    request_id: int
    num_computed_tokens: int
    num_new_tokens: int


@dataclass(frozen=True)
class Step:
    """What one step did; start and end in seconds on the engine's clock.

    scheduled: who took part, in batch order. preempted: ids that lost their memory in this step.
    waiting: ids that had to wait, in the order of the queue.
    """

    index: int
    start: float
    end: float
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


class Engine:
    """Runs requests to their end, one step at a time.

    place: gives a batch its places in memory (`PagedBatch.place`); memory without places needs none.
    clock: seconds, for the requests' metrics. on_step: called after each step's tokens are there and
    before the memory of finished requests is given back.

    Invariant: between steps the books of memory, the store's tensors and the scheduler's lists agree,
    also after a step that failed.
    """

    def __init__(
        self,
        model: Decoder,
        manager: KVManager,
        store: KVStore,
        scheduler: ContinuousScheduler,
        place: Callable[[Batch], Batch] = lambda batch: batch,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[Step], None] | None = None,
    ):
        self.model, self.manager, self.store, self.scheduler = model, manager, store, scheduler
        self.place, self.clock, self.on_step = place, clock, on_step
        self.num_steps = 0
        self.shield = Shield()
        self._in_step = False

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong for one that can never fit."""
        with self.shield:
            self.scheduler.add(request)
            request.metrics.arrival_time = self.clock()

    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_unfinished()

    def finish(self, request: Request, reason: str, stop_reason: str | None = None) -> None:
        """End a request wherever it stands; one that has ended stays as it is."""
        with self.shield:
            self.scheduler.finish(request, reason, stop_reason)
            self.store.free(request.request_id)

    def step(self) -> list[Request]:
        """Give each scheduled request one more token; returns them, also those that end with it.

        A step that fails is undone: its requests wait and begin again. Raises InvalidLogits when the model
        gives no usable logits for a request, which is then ended ("abort"), OutOfMemory, and EngineBusy where
        a listener calls it.
        """
        if self._in_step:
            raise EngineBusy("The engine is in the middle of a step; a listener can look at it, and abort.")
        with self.shield:  # Ctrl-C reaches the model and the listener, not the books
            self._in_step = True
            try:
                return self._step()
            finally:
                self._in_step = False

    def _step(self) -> list[Request]:
        start = self.clock()
        plan = self.scheduler.schedule()
        for request in plan.preempted:
            self.store.free(request.request_id)
        if not plan.scheduled:
            assert not self.scheduler.has_unfinished(), "requests wait, and none of them can run"
            return []
        chance = [request.generator.getstate() for request, _ in plan.scheduled]
        try:
            with self.shield.lowered():
                tokens = self._compute(plan)
        except BaseException as error:
            self._undo(plan, chance)
            self._explain(plan, error)
            raise
        end = self.clock()
        try:
            if self.on_step is not None:
                with self.shield.lowered():
                    self.on_step(self._describe(plan, start, end))
        finally:  # whatever a listener does, no token is lost
            self._take(plan, tokens, start, end)
        return [request for request, _ in plan.scheduled]

    def _take(self, plan: SchedulerOutput, tokens: dict[int, int], start: float, end: float) -> None:
        self.num_steps += 1
        for request, _ in plan.scheduled:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = start
            if request.finish_reason is None:
                request.metrics.token_times.append(end)
            else:  # aborted by a listener: it does not get this step's token
                del request.logprobs[len(request.output_token_ids) :]
        for request in self.scheduler.update(plan, tokens):
            self.store.free(request.request_id)
        if not self.store.keeps_kv:
            for request, _ in plan.scheduled:
                request.num_computed_tokens = 0

    @torch.inference_mode()
    def _compute(self, plan: SchedulerOutput) -> dict[int, int]:
        """One token for each scheduled request, by its id."""
        requests = [request for request, _ in plan.scheduled]
        new = [(r.request_id, r.new_token_ids(), r.num_computed_tokens) for r in requests]
        batch = self.place(Batch.pack(new, self.model.device))
        logits = self.model(batch, self.store)
        params = [r.params for r in requests]
        prompts, outputs = [r.prompt_token_ids for r in requests], [r.output_token_ids for r in requests]
        adjusted = adjust(logits, params, prompts, outputs, self.model.config.eos_token_ids)
        tokens = sample(adjusted, params, [r.generator for r in requests])
        self._keep_logprobs(requests, logits, tokens)
        return {r.request_id: token for r, token in zip(requests, tokens, strict=True)}

    def _keep_logprobs(self, requests: list[Request], logits: Tensor, tokens: list[int]) -> None:
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if request.params.logprobs is not None:
                request.logprobs.append(top_logprobs(logits[row], token, request.params.logprobs))

    def _undo(self, plan: SchedulerOutput, chance: list[Any]) -> None:
        """As if the step had never begun: no keys, no log-probabilities, no number drawn."""
        for (request, _), state in zip(plan.scheduled, chance, strict=True):
            self.store.free(request.request_id)
            del request.logprobs[len(request.output_token_ids) :]
            request.generator.setstate(state)
        self.scheduler.take_back()

    def _explain(self, plan: SchedulerOutput, error: BaseException) -> None:
        """Raise the project's own error where there is one."""
        if isinstance(error, InvalidLogits):
            request = plan.scheduled[error.row][0]
            self.finish(request, "abort")
            message = f"Request {request.request_id} was ended. {error}"
            raise InvalidLogits(message, error.row, request.request_id) from error
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemory(
                f"The device has no memory left for a step of {sum(n for _, n in plan.scheduled)} tokens. "
                "Lower max_num_seqs or kv_cache_memory_bytes."
            ) from error

    def _describe(self, plan: SchedulerOutput, start: float, end: float) -> Step:
        scheduled = (ScheduledRequest(r.request_id, r.num_computed_tokens, n) for r, n in plan.scheduled)
        preempted = (r.request_id for r in plan.preempted)
        waiting = (r.request_id for r in self.scheduler.waiting)
        return Step(self.num_steps, start, end, tuple(scheduled), tuple(preempted), tuple(waiting))
