"""Above the chapters: the engine with text in front of it: requests in, steps, texts out.

What a caller does by hand is here: add a request, step, abort. `llm.py` adds the calls that do all of it.
Whoever adds requests, they run in the same steps.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Hashable, Sequence
from random import Random
from typing import Self

from minivllm.decoding.generate import check_params, check_prompt
from minivllm.engine import Engine
from minivllm.errors import EngineClosed, InvalidLogits, InvalidOption, InvalidPrompt, RequestTooLong
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.prefix_stats import PrefixCacheStats
from minivllm.model.tokenizer import Tokenizer
from minivllm.output_processor import RequestState
from minivllm.outputs import RequestOutput
from minivllm.params import BeamSearchParams, SamplingParams
from minivllm.prompts import Prompt, params_for, parse, priorities_for
from minivllm.scheduling.request import Request
from minivllm.scheduling.request_memory import PreemptionCounters

logger = logging.getLogger(__name__)


class LLMEngine:
    """Requests under way, and the text that has come of each.

    max_model_len: most tokens of prompt and output together. seed: where requests without a seed of their
    own draw from; None draws a fresh one.

    Invariant: a request is under way in the engine if and only if its state is kept here, after any error
    and any Ctrl-C; one that has ended is kept only until `step` has given its output.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, max_model_len: int, seed: int | None = 0):
        self._engine: Engine | None = engine
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seed = seed
        self._num_requests = 0
        self._states: dict[int, RequestState] = {}  # requests under way
        self._added: set[int] = set()  # of these, the ones whose output `step` gives
        self._awaited: set[int] = set()  # and the ones that a call of `generate` waits for
        self._news: dict[int, RequestState] = {}  # those that `step` has something new to say of

    @property
    def engine(self) -> Engine:
        """The engine, for its memory and its events. Raises EngineClosed."""
        if self._engine is None:
            raise EngineClosed("This LLM was closed and holds no model any more; make a new one.")
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        priority: int | None = None,
    ) -> int:
        """Queue a request for `step`; returns its id. Raises InvalidPrompt, RequestTooLong, InvalidOption."""
        if not isinstance(params, BeamSearchParams):
            params = params_for(params, 1)[0]
        state = self._prepare(prompt, params, self._priorities(priority, 1)[0])
        with self.engine.shield:
            self._queue(state)
            self._added.add(state.request_id)
        return state.request_id

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises PrefixCacheInUse while requests hold memory, and InvalidOption
        where there is no prefix cache."""
        self._prefix_manager().reset()

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache was asked for and has found so far. Raises InvalidOption without one."""
        return self._prefix_manager().stats

    @property
    def preemption_counters(self) -> PreemptionCounters:
        """What preemption has cost since the start."""
        return self.engine.scheduler.memory.counters

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the added requests that have something new, each whole from its start.

        What came in while `generate` or a stream ran is given with the next call.
        """
        if self.engine.has_unfinished():
            self._advance()
        else:  # an interrupt may have come between a last token and its text
            for state in list(self._states.values()):
                self._close(state)
        news, self._news = self._news, {}
        return [state.output() for state in news.values()]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to give."""
        return bool(self._added or self._news)

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request wherever it stands; returns what it had. One that is unknown or has ended: None."""
        state = self._states.get(request_id) if isinstance(request_id, Hashable) else None
        if state is None:
            return None
        self._abort([state])
        return state.output()

    def close(self) -> None:
        """Let go of model and memory; requests under way are aborted. Closing twice is no fault."""
        if self._engine is not None:
            self._abort(list(self._states.values()))
            self._news.clear()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prefix_manager(self) -> PrefixCachingManager:
        manager = self.engine.manager
        if not isinstance(manager, PrefixCachingManager):
            raise InvalidOption("There is no prefix cache: make the LLM with enable_prefix_caching=True.")
        return manager

    def _priorities(self, priority: int | Sequence[int] | None, n: int) -> list[int]:
        if priority is not None and self.engine.scheduler.policy != "priority":
            raise InvalidOption(
                f"priority={priority!r} is not possible with scheduling_policy='fcfs': make the LLM with "
                "scheduling_policy='priority'."
            )
        return priorities_for(priority, n)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, priority: int = 0, which: str = ""
    ) -> RequestState:
        """A request that has been checked and can be queued."""
        engine, max_model_len = self.engine, self._max_model_len
        config = engine.model.config
        try:
            text, token_ids, cache_salt = parse(prompt, self._tokenizer)
            check_prompt(token_ids, config)
            if isinstance(params, SamplingParams):
                check_params(params, config)
            if len(token_ids) >= max_model_len:
                raise RequestTooLong(
                    f"The prompt has {len(token_ids)} tokens and max_model_len is {max_model_len}, of which "
                    "one must be left to generate. Shorten the prompt, or raise max_model_len."
                )
            request = Request(
                request_id=0,  # it gets its number when it is queued
                prompt_token_ids=[int(token) for token in token_ids],
                params=params,
                eos_token_ids=config.eos_token_ids,
                max_model_len=max_model_len,
                priority=priority,
                cache_salt=cache_salt,
            )
            requests = [request] if engine.scheduler.memory.sharing is not None else request.split()
            for each in requests:
                engine.scheduler.check(each)
        except (InvalidPrompt, InvalidOption) as error:
            raise type(error)(f"{which}{error}") from error
        return RequestState(requests, text, self._tokenizer)

    def _queue(self, state: RequestState) -> None:
        with self.engine.shield:
            request_id = self._num_requests
            for request in state.requests:
                request.number(request_id)
                for sequence in request.sequences:
                    sequence.generator = self._generator(request.params, request_id, sequence.index)
            for request in state.requests:
                self.engine.add(request)
            self._num_requests += 1
            self._states[request_id] = state

    def _abort(self, states: Sequence[RequestState]) -> None:
        """End those of these requests that are still under way."""
        under_way = [state for state in states if self._states.get(state.request_id) is state]
        if under_way:
            with self.engine.shield:
                for state in under_way:
                    for request in state.requests:
                        self.engine.finish(request, "abort")
                    self._added.discard(state.request_id)
                    self._news.pop(state.request_id, None)
                    self._close(state)

    def _generator(self, params: SamplingParams | BeamSearchParams, request_id: int, index: int) -> Random:
        if isinstance(params, SamplingParams) and params.seed is not None:
            return Random(params.seed + index)
        name = f"{self._seed}/{request_id}" + (f"/{index}" if index else "")
        return Random() if self._seed is None else Random(name)

    def _advance(self, mine: Container[int] | None = None) -> None:
        """One step of the engine, and the text that came of it.

        Where the step ended another caller's request for its logits, mine go on, and that is only noted.
        """
        with self.engine.shield:
            try:
                requests = self.engine.step()
            except BaseException as error:
                self._read(list(self._states.values()))  # a listener may have failed after tokens were taken
                owner = _caller_id(error.request_id) if isinstance(error, InvalidLogits) else None
                if owner is None or mine is None or owner in mine:
                    raise
                logger.warning("%s", error)
            else:
                ids = dict.fromkeys([_caller_id(request.request_id) for request in requests])
                self._read([self._states[i] for i in ids if i in self._states])
                if (
                    not self.engine.has_unfinished()
                ):  # a listener may have ended some that were not in the step
                    self._read(list(self._states.values()))

    def _read(self, states: Sequence[RequestState]) -> None:
        """Turn new tokens to text, end what a stop string ends, and note what `step` has to give."""
        for state in states:
            news = state.news()
            for text in news:
                stop, sequence = text.read_new_tokens(), text.sequence
                if stop is not None and sequence.finish_reason is not None:
                    sequence.finish_reason, sequence.stop_reason = "stop", stop
                elif stop is not None:
                    self.engine.finish(text.request, "stop", stop, sequence)
            finished = state.finished
            if (news or finished) and state.request_id in self._added:
                self._news[state.request_id] = state
            if finished:
                self._close(state)

    def _close(self, state: RequestState) -> None:
        """A request has ended: its texts are complete, and `step` has its last word to give."""
        self._states.pop(state.request_id, None)
        self._awaited.discard(state.request_id)
        if state.request_id in self._added:
            self._added.remove(state.request_id)
            self._news[state.request_id] = state
        state.read_new_tokens()


def _caller_id(request_id: int | None) -> int | None:
    """The caller's number of an engine's request: of several for one prompt, the first has it."""
    return None if request_id is None else request_id % 2**32
