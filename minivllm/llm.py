"""Above the chapters: `LLM`, the front door: text in, text out.

    llm = LLM("smollm2-135m")
    llm.generate("The capital of France is")[0].outputs[0].text

It chooses the engine's parts by name, turns prompts into requests and tokens into text, and gives back what
was asked for. One engine serves all its calls: `generate`, `stream` and requests added one by one run in
the same steps. It is not made for several threads.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from numbers import Integral
from os import PathLike

from tqdm.auto import tqdm

from minivllm.engine_args import EngineArgs
from minivllm.engine_parts import build_engine
from minivllm.errors import InvalidOption
from minivllm.llm_engine import LLMEngine
from minivllm.model.decoder import Decoder
from minivllm.model.hub import resolve
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import Tokenizer, load_tokenizer
from minivllm.output_processor import RequestState
from minivllm.outputs import RequestOutput
from minivllm.params import BeamSearchParams, SamplingParams
from minivllm.prompts import Params, Prompt, as_list, beam_params_for, conversations, params_for


class LLM(LLMEngine):
    """A model, a memory, a scheduler, and the requests that are under way.

    model: a name such as "smollm2-135m", a hub id, a folder, a .gguf file, "random:<preset>" (weights from
        `seed`), or a Decoder that is loaded already, with its tokenizer. It stays as it is: where weights are
        packed (see `EngineArgs.enforce_eager`), the packed ones take as much memory again.
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
        sharing: bool | None = None,
        prefix_cache: str | None = None,
        enable_prefix_caching: bool | None = None,
        preemption: str | None = None,
        swap_space: int | None = None,
        scheduling_policy: str | None = None,
        watermark: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        long_prefill_token_threshold: int | None = None,
        prefer_prefill: bool | None = None,
        enforce_eager: bool = False,
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
            sharing=sharing,
            prefix_cache=prefix_cache,
            enable_prefix_caching=enable_prefix_caching,
            preemption=preemption,
            swap_space=swap_space,
            scheduling_policy=scheduling_policy,
            watermark=watermark,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            prefer_prefill=prefer_prefill,
            enforce_eager=enforce_eager,
        )  # refused here, before a model is loaded
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0):
            raise InvalidOption(
                f"seed={seed!r} is not possible: it must be None, or a whole number from 0 on."
            )
        if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise InvalidOption(f"tokenizer={tokenizer!r} is none: take load_tokenizer(model).")
        seed = None if seed is None else int(seed)
        decoder, text = _load(model, tokenizer, dtype, device, seed)
        self.args = args.resolve(decoder)  # what was chosen, defaults filled in
        engine = build_engine(decoder, self.args, keep_weights=isinstance(model, Decoder))
        super().__init__(engine, text, int(self.args.max_model_len or 0), seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several; one output for each, in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; in the last
        two, "cache_salt": a text, of which only requests with the same find each other's cached prefixes.
        params: one for all, one for each, or None for SamplingParams(). priority: the same, for
        scheduling_policy="priority"; the lower comes first. use_tqdm: a progress bar; None shows it on a
        terminal. Raises InvalidPrompt, RequestTooLong, InvalidOption before anything is computed; after
        any error, Ctrl-C too, none of these requests is left behind.
        """
        many = as_list(prompts)
        return self._complete(many, params_for(params, len(many)), priority, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Find likely continuations of one prompt or several; beam_width outputs for each, best first.

        Sequences and scores are those of Transformers' `generate(num_beams=beam_width)`. Each output has
        cumulative_logprob and score; `sharing` says what the beams shared. Needs cache="paged".
        """
        many = as_list(prompts)
        return self._complete(many, beam_params_for(params, len(many)), priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: Params = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": ..., "content": ...}."""
        token_ids = [self._tokenizer.apply_chat_template(c) for c in conversations(messages)]
        prompts = [{"prompt_token_ids": ids} for ids in token_ids]
        return self.generate(prompts, params, priority=priority, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[str, None, RequestOutput]:
        """Continue one prompt and yield its text piece by piece, each as soon as it is certain.

        The request is checked at once, not at the first piece. The generator's return value is the
        RequestOutput. A stream that is closed early ends its request.
        """
        p = params_for(params, 1)[0]
        if p.n > 1:
            raise InvalidOption(f"n={p.n} is not possible in a stream, which gives one text; use generate.")
        return self._pieces(self._prepare(prompt, p))

    def _complete(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        priority: int | Sequence[int] | None,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        """Run requests to their end; all are checked before the first is queued."""
        _ = self.engine  # raises EngineClosed, also where there is no prompt
        states = []
        priorities = self._priorities(priority, len(prompts))
        for number, (prompt, p, rank) in enumerate(zip(prompts, params, priorities, strict=True)):
            which = f"Prompt {number}: " if len(prompts) > 1 else ""
            states.append(self._prepare(prompt, p, rank, which))
        try:
            for state in states:
                self._queue(state)
            self._run(states, use_tqdm)
        finally:
            self._abort(states)
        return [state.output() for state in states]

    def _run(self, states: Sequence[RequestState], use_tqdm: bool | None) -> None:
        """Step until all of these have ended."""
        self._awaited = {state.request_id for state in states if not state.finished}
        hidden = None if use_tqdm is None else not use_tqdm  # None: hidden where there is no terminal
        with tqdm(total=len(states), unit="request", disable=hidden) as bar:
            mine = {state.request_id for state in states}
            while left := len(self._awaited):
                self._advance(mine)
                ended = left - len(self._awaited)
                if ended and not bar.disable:
                    tokens = sum(state.num_output_tokens for state in states)
                    bar.set_postfix_str(f"{tokens / bar.format_dict['elapsed']:.1f} tok/s", refresh=False)
                    bar.update(ended)

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
                    self._advance({state.request_id})
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
