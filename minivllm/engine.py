"""Above the chapters: the engine: one loop that joins scheduler, memory, model and sampler.

It is handed its parts and chooses none (`llm.py` does). A step is: plan, pack, place, compute, sample,
take the tokens. It prints nothing, measures nothing and draws nothing: after each step it tells
`on_step` what was done, and `lab` keeps what it wants of that.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from minivllm.decoding.beam_search import advance
from minivllm.decoding.beams import BeamSearch
from minivllm.decoding.penalties import adjust
from minivllm.decoding.sampler import sample, top_logprobs
from minivllm.errors import EngineBusy, InvalidLogits, OutOfMemory
from minivllm.interrupt import Shield
from minivllm.memory.manager import KVManager
from minivllm.memory.sharing_store import SharingStore
from minivllm.memory.store import KVStore
from minivllm.memory.swap_store import SwapStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.params import SamplingParams
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.plan import ScheduledSequence, SchedulerOutput
from minivllm.scheduling.request import Request
from minivllm.scheduling.sequence import Sequence
from minivllm.step import ScheduledRequest, Step

Beams: TypeAlias = dict[int, list[tuple[int, int]]]  # request id -> (row of the parent, token) of each beam


class Engine:
    """Runs requests to their end, one step at a time.

    place: gives a batch its places in memory (`PagedBatch.place`); memory without places needs none.
    pack: what makes the batch of a step, its places included, in place of `Batch.pack` and place: the same,
    faster. forward: what computes the logits in place of the model: the same numbers, faster.
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
        pack: Callable[[Many[ScheduledSequence]], Batch] | None = None,
        forward: Callable[[Batch, KVStore], Tensor] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[Step], None] | None = None,
    ):
        self.model, self.manager, self.store, self.scheduler = model, manager, store, scheduler
        self.place, self.pack, self.forward = place, pack, forward
        self.clock, self.on_step = clock, on_step
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

    def finish(
        self,
        request: Request,
        reason: str,
        stop_reason: str | None = None,
        sequence: Sequence | None = None,
    ) -> None:
        """End a request wherever it stands, or one sequence of it; what has ended stays as it is.

        Raises EngineBusy for a single sequence in the middle of a step.
        """
        if sequence is not None and self._in_step:
            raise EngineBusy("In the middle of a step only a whole request can be ended.")
        with self.shield:
            ended = request.live if sequence is None else [sequence]
            self.scheduler.finish(request, reason, stop_reason, sequence)
            self._let_go(ended)

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
            self._let_go(request.live)
        if not plan.scheduled:
            assert not self.scheduler.has_unfinished(), "requests wait, and none of them can run"
            return []
        sampled = list(dict.fromkeys([part.request for part in plan.scheduled if part.samples]))
        searches = {request: copy.copy(request.search) for request in sampled if request.search is not None}
        try:
            with self.shield.lowered():
                tokens, beams = self._compute(plan)
        except BaseException as error:
            self._undo(plan, sampled, searches)
            self._explain(plan, error)
            raise
        end = self.clock()
        try:
            if self.on_step is not None:
                with self.shield.lowered():
                    self.on_step(self._describe(plan, start, end))
        finally:  # whatever a listener does, no token is lost
            self._take(plan, sampled, tokens, beams, start, end)
        return sampled

    def _take(
        self,
        plan: SchedulerOutput,
        sampled: list[Request],
        tokens: dict[int, int],
        beams: Beams,
        start: float,
        end: float,
    ) -> None:
        self.num_steps += 1
        for part in plan.scheduled:
            if part.request.metrics.first_scheduled_time is None:
                part.request.metrics.first_scheduled_time = start
        for request in sampled:
            if request.live:
                request.metrics.token_times.append(end)
            else:  # aborted by a listener: it does not get this step's token
                _cut_logprobs(request)
        for request in self.scheduler.update(plan, tokens, beams):
            self._let_go(request.sequences)
        if not self.store.keeps_kv:
            for part in plan.scheduled:
                part.sequence.num_computed_tokens = 0

    @torch.inference_mode()
    def _compute(self, plan: SchedulerOutput) -> tuple[dict[int, int], Beams]:
        """Move blocks, run the model, and choose: a token by sequence id, new beams by request id."""
        if isinstance(self.store, SwapStore):
            self.store.swap_out(plan.swap_out)
            self.store.swap_in(plan.swap_in)
        if isinstance(self.store, SharingStore):
            self.store.copy_blocks(plan.block_copies)
        pack = self._pack if self.pack is None else self.pack
        forward = self.model if self.forward is None else self.forward
        logits = forward(pack(plan.scheduled), self.store)
        parts = [part for part in plan.scheduled if part.samples]
        return self._sample(parts, logits), self._search(parts, logits)

    def _pack(self, parts: Many[ScheduledSequence]) -> Batch:
        """The batch of a step, with its places in memory, and logits for the parts that sample."""
        new = [
            (part.sequence.seq_id, part.new_token_ids(), part.sequence.num_computed_tokens) for part in parts
        ]
        batch = self.place(Batch.pack(new, self.model.device))
        rows = [row for row, part in enumerate(parts) if part.samples]
        return replace(batch, logits_indices=batch.logits_indices[rows])

    def _sample(self, parts: list[ScheduledSequence], logits: Tensor) -> dict[int, int]:
        """The next token of every sequence that is sampled; several may draw from one row of logits."""
        drawn: list[tuple[int, Request, SamplingParams, Sequence]] = []
        for row, (request, _, _, samples) in enumerate(parts):
            if isinstance(request.params, SamplingParams):
                drawn += [(row, request, request.params, sequence) for sequence in samples]
        if not drawn:
            return {}
        rows, requests, params, sequences = zip(*drawn, strict=True)
        if rows != tuple(range(len(logits))):
            logits = logits[list(rows)]
        prompts, outputs = [r.prompt_token_ids for r in requests], [s.output_token_ids for s in sequences]
        adjusted = adjust(logits, params, prompts, outputs, self.model.config.eos_token_ids)
        try:
            chance: Many[Any] = sequences  # each gives its number
            tokens = sample(adjusted, params, chance)
        except InvalidLogits as error:
            error.request_id = requests[error.row].request_id
            raise
        for row, (p, sequence, token) in enumerate(zip(params, sequences, tokens, strict=True)):
            if p.logprobs is not None:
                sequence.logprobs.append(top_logprobs(logits[row], token, p.logprobs))
        return {sequence.seq_id: token for sequence, token in zip(sequences, tokens, strict=True)}

    def _search(self, parts: list[ScheduledSequence], logits: Tensor) -> Beams:
        """How every beam search goes on, from the rows of its live beams."""
        rows: dict[Request, list[int]] = {}
        for row, part in enumerate(parts):
            if part.request.search is not None:
                rows.setdefault(part.request, []).append(row)
        beams: Beams = {}
        for request, own in rows.items():
            assert request.search is not None
            try:
                beams[request.request_id] = advance(request.search, logits[own])
            except InvalidLogits as error:
                error.request_id = request.request_id
                raise
        return beams

    def _undo(
        self, plan: SchedulerOutput, sampled: list[Request], searches: dict[Request, BeamSearch]
    ) -> None:
        """As if the step had never begun: no keys, no log-probabilities, no beam chosen. A number that was
        drawn is drawn again."""
        for part in plan.scheduled:
            self._let_go([part.sequence])
        for request in sampled:
            _cut_logprobs(request)
            request.search = searches.get(request)
        self.scheduler.take_back(plan)

    def _explain(self, plan: SchedulerOutput, error: BaseException) -> None:
        """Raise the project's own error where there is one."""
        if isinstance(error, InvalidLogits):
            request = next(
                part.request for part in plan.scheduled if part.request.request_id == error.request_id
            )
            self.finish(request, "abort")
            message = f"Request {request.request_id} was ended. {error}"
            raise InvalidLogits(message, error.row, request.request_id) from error
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemory(
                f"The device has no memory left for a step of {plan.num_tokens} tokens. "
                "Lower max_num_seqs or kv_cache_memory_bytes."
            ) from error

    def _let_go(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.store.free(sequence.seq_id)

    def _describe(self, plan: SchedulerOutput, start: float, end: float) -> Step:
        scheduled = (
            ScheduledRequest(
                part.request.request_id,
                part.sequence.num_computed_tokens,
                part.num_new_tokens,
                len(part.samples),
                (part.sequence.seq_id - part.request.request_id) >> 32,
            )
            for part in plan.scheduled
        )
        preempted = (r.request_id for r in plan.preempted)
        waiting = (r.request_id for r in self.scheduler.waiting)
        moved = len(plan.swap_out), len(plan.swap_in), len(plan.block_copies)
        return Step(self.num_steps, start, end, tuple(scheduled), tuple(preempted), tuple(waiting), *moved)


def _cut_logprobs(request: Request) -> None:
    for sequence in request.sequences:
        del sequence.logprobs[len(sequence.output_token_ids) :]
