"""Above the chapters: `LLM`, the front door: text in, text out.

    llm = LLM("smollm2-135m")
    llm.generate("The capital of France is")[0].outputs[0].text

It chooses the engine's parts by name, turns prompts into requests and tokens into text, and gives back what
was asked for. One engine serves all its calls: `generate`, `stream` and requests added one by one run in
the same steps. It is not made for several threads.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Generator, Hashable, Mapping, Sequence
from numbers import Integral
from os import PathLike
from random import Random

from tqdm.auto import tqdm

from minivllm.decoding.generate import check_params, check_prompt
from minivllm.engine import Engine
from minivllm.engine_args import EngineArgs, build_engine
from minivllm.errors import EngineClosed, InvalidLogits, InvalidOption, InvalidPrompt, RequestTooLong
from minivllm.model.decoder import Decoder
from minivllm.model.hub import resolve
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import Tokenizer, load_tokenizer
from minivllm.output_processor import RequestState
from minivllm.outputs import RequestOutput
from minivllm.params import SamplingParams
from minivllm.prompts import Params, Prompt, as_list, conversations, params_for, parse
from minivllm.scheduling.request import Request

logger = logging.getLogger(__name__)


class LLM:
    """A model, a memory, a scheduler, and the requests that are under way.

    model: a name such as "smollm2-135m", a hub id, a folder, a .gguf file, "random:<preset>" (weights from
        `seed`), or a Decoder that is loaded already, with its tokenizer.
    dtype: "auto", "float32", "bfloat16", ...; device: "auto", "cpu", "cuda", "cuda:1".
    seed: where requests without a seed of their own draw from: the same calls in the same order give the
        same tokens. None draws a fresh one.
    All other options are those of `EngineArgs`, which says what they mean and default to.

    Raises InvalidOption, ModelNotFound, InvalidModel; from `close` on, EngineClosed.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Decoder = "smollm2-135m",
        *,
        tokenizer: Tokenizer | None = None,
        dtype: str = "auto",
        device: str = "auto",
        seed: int | None = 0,
        cache: str = "paged",
        scheduler: str | None = None,
        attention: str | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        reservation: str | None = None,
        preemption: str | None = None,
        scheduling_policy: str | None = None,
        watermark: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
    ):
        args = EngineArgs(
            cache=cache,
            scheduler=scheduler,
            attention=attention,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            block_size=block_size,
            num_blocks=num_blocks,
            reservation=reservation,
            preemption=preemption,
            scheduling_policy=scheduling_policy,
            watermark=watermark,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )  # refused here, before a model is loaded
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0):
            raise InvalidOption(
                f"seed={seed!r} is not possible: it must be None, or a whole number from 0 on."
            )
        if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise InvalidOption(f"tokenizer={tokenizer!r} is none: take load_tokenizer(model).")
        seed = None if seed is None else int(seed)
        decoder, self._tokenizer = _load(model, tokenizer, dtype, device, seed)
        self.args = args.resolve(decoder)  # what was chosen, defaults filled in
        self._seed = seed
        self._engine: Engine | None = build_engine(decoder, self.args)
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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several; one output for each, in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. params: one
        for all, one for each, or None for SamplingParams(). use_tqdm: a progress bar; None shows it on a
        terminal. Raises InvalidPrompt, RequestTooLong, InvalidOption before anything is computed; after
        any error, Ctrl-C too, none of these requests is left behind.
        """
        _ = self.engine  # raises EngineClosed, also where there is no prompt
        many = as_list(prompts)
        each = params_for(params, len(many))
        states = []
        for number, (prompt, p) in enumerate(zip(many, each, strict=True)):
            states.append(self._prepare(prompt, p, f"Prompt {number}: " if len(many) > 1 else ""))
        try:
            for state in states:
                self._queue(state)
            self._run(states, use_tqdm)
        finally:
            self._abort(states)
        return [state.output() for state in states]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: Params = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": ..., "content": ...}."""
        token_ids = [self._tokenizer.apply_chat_template(c) for c in conversations(messages)]
        prompts = [{"prompt_token_ids": ids} for ids in token_ids]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[str, None, RequestOutput]:
        """Continue one prompt and yield its text piece by piece, each as soon as it is certain.

        The request is checked at once, not at the first piece. The generator's return value is the
        RequestOutput. A stream that is closed early ends its request.
        """
        return self._pieces(self._prepare(prompt, params_for(params, 1)[0]))

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

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prepare(self, prompt: Prompt, params: SamplingParams, which: str = "") -> RequestState:
        """A request that has been checked and can be queued."""
        engine, max_model_len = self.engine, int(self.args.max_model_len or 0)
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

    def _run(self, states: Sequence[RequestState], use_tqdm: bool | None) -> None:
        """Step until all of these have ended."""
        left = [state for state in states if not state.finished]
        hidden = None if use_tqdm is None else not use_tqdm  # None: hidden where there is no terminal
        with tqdm(total=len(states), unit="request", disable=hidden) as bar:
            mine = {state.request.request_id for state in states}
            while left:
                self._advance(mine)
                unfinished = [state for state in left if not state.finished]
                if len(unfinished) < len(left) and not bar.disable:
                    tokens = sum(len(state.request.output_token_ids) for state in states)
                    bar.set_postfix_str(f"{tokens / bar.format_dict['elapsed']:.1f} tok/s", refresh=False)
                    bar.update(len(left) - len(unfinished))
                left = unfinished

    def _pieces(self, state: RequestState) -> Generator[str, None, RequestOutput]:
        given = 0
        try:
            self._queue(state)
            while True:
                if len(state.text) > given:
                    piece, given = state.text[given:], len(state.text)
                    yield piece
                elif state.finished:
                    return state.output()
                else:
                    self._advance({state.request.request_id})
        finally:
            self._abort([state])


def _load(
    model: str | PathLike[str] | Decoder,
    tokenizer: Tokenizer | None,
    dtype: str,
    device: str,
    seed: int | None,
) -> tuple[Decoder, Tokenizer]:
    if isinstance(model, Decoder):
        if tokenizer is None:
            raise InvalidOption(
                "A model that is loaded already needs its tokenizer: tokenizer=load_tokenizer(...)."
            )
        if (dtype, device) != ("auto", "auto"):
            raise InvalidOption("A model that is loaded already has its dtype and device; leave both out.")
        return model, tokenizer
    source = resolve(model)
    weights_seed = seed or 0 if source.kind == "random" else 0
    decoder = load_model(source, dtype=dtype, device=device, seed=weights_seed)
    return decoder, load_tokenizer(source) if tokenizer is None else tokenizer
