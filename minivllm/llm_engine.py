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
from minivllm.model.tokenizer import Tokenizer
from minivllm.output_processor import RequestState
from minivllm.outputs import RequestOutput
from minivllm.params import SamplingParams
from minivllm.prompts import Prompt, params_for, parse
from minivllm.scheduling.request import Request

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

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request for `step`; returns its id. Raises InvalidPrompt, RequestTooLong, InvalidOption."""
        state = self._prepare(prompt, params_for(params, 1)[0])
        with self.engine.shield:
            self._queue(state)
            self._added.add(state.request.request_id)
        return state.request.request_id

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

    def _prepare(self, prompt: Prompt, params: SamplingParams, which: str = "") -> RequestState:
        """A request that has been checked and can be queued."""
        engine, max_model_len = self.engine, self._max_model_len
        config = engine.model.config
        try:
            text, token_ids = parse(prompt, self._tokenizer)
            check_prompt(token_ids, config)
            check_params(params, config)
            if len(token_ids) >= max_model_len:
                raise RequestTooLong(
                    f"The prompt has {len(token_ids)} tokens and max_model_len is {max_model_len}, of which "
                    "one must be left to generate. Shorten the prompt, or raise max_model_len."
                )
            request = Request(
                request_id=-1,  # it gets its number when it is queued
                prompt_token_ids=[int(token) for token in token_ids],
                params=params,
                eos_token_ids=config.eos_token_ids,
                max_model_len=max_model_len,
            )
            engine.scheduler.check(request)
        except (InvalidPrompt, InvalidOption) as error:
            raise type(error)(f"{which}{error}") from error
        return RequestState(request, text, self._tokenizer)

    def _queue(self, state: RequestState) -> None:
        request = state.request
        with self.engine.shield:
            request.request_id = self._num_requests
            request.generator = self._generator(request.params, request.request_id)
            self.engine.add(request)
            self._num_requests += 1
            self._states[request.request_id] = state

    def _abort(self, states: Sequence[RequestState]) -> None:
        """End those of these requests that are still under way."""
        under_way = [state for state in states if self._states.get(state.request.request_id) is state]
        if under_way:
            with self.engine.shield:
                for state in under_way:
                    self.engine.finish(state.request, "abort")
                    self._added.discard(state.request.request_id)
                    self._news.pop(state.request.request_id, None)
                    self._close(state)

    def _generator(self, params: SamplingParams, request_id: int) -> Random:
        if params.seed is not None:
            return Random(params.seed)
        return Random() if self._seed is None else Random(f"{self._seed}/{request_id}")

    def _advance(self, mine: Container[int] | None = None) -> None:
        """One step of the engine, and the text that came of it.

        Where the step ended another caller's request for its logits, mine go on, and that is only noted.
        """
        with self.engine.shield:
            try:
                requests = self.engine.step()
            except BaseException as error:
                self._read(list(self._states.values()))  # a listener may have failed after tokens were taken
                if not isinstance(error, InvalidLogits) or mine is None or error.request_id in mine:
                    raise
                logger.warning("%s", error)
            else:
                self._read([self._states[i] for i in (r.request_id for r in requests) if i in self._states])

    def _read(self, states: Sequence[RequestState]) -> None:
        """Turn new tokens to text, end what a stop string ends, and note what `step` has to give."""
        for state in states:
            request = state.request
            if not state.has_news:
                continue
            stop = state.read_new_tokens()
            if stop is not None and state.finished:
                request.finish("stop", stop)
            elif stop is not None:
                self.engine.finish(request, "stop", stop)
            if request.request_id in self._added:
                self._news[request.request_id] = state
            if state.finished:
                self._close(state)

    def _close(self, state: RequestState) -> None:
        """A request has ended: its text is complete, and `step` has its last word to give."""
        request_id = state.request.request_id
        self._states.pop(request_id, None)
        if request_id in self._added:
            self._added.remove(request_id)
            self._news[request_id] = state
        state.read_new_tokens()
