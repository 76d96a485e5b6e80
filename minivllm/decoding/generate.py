"""Chapter 0: the generate loop. Everything that a serving engine adds stands around these few lines."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from numbers import Integral
from random import Random

import torch

from minivllm.decoding.penalties import adjust
from minivllm.decoding.sampler import sample
from minivllm.decoding.stopping import finish_reason, stop_token_ids
from minivllm.errors import InvalidOption, InvalidPrompt, RequestTooLong
from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig
from minivllm.model.decoder import Decoder
from minivllm.params import SamplingParams


@torch.inference_mode()
def generate(
    model: Decoder, store: KVStore, prompt: Sequence[int], params: SamplingParams, seq_id: int = 0
) -> Generator[int, None, None]:
    """Yield the tokens that follow a prompt of token ids, one by one, the end-of-sequence token included.

    Ends after params.max_tokens, at the model's longest context, or at a token that stops. Raises
    InvalidPrompt. The store lets go of the sequence at the end, also when the caller stops early.
    """
    check_prompt(prompt, model.config)
    check_params(params, model.config)
    if params.stop or params.logprobs is not None or params.n > 1:
        raise InvalidOption(
            "This loop gives the token ids of one sequence, no text; for n, stop and logprobs use LLM."
        )
    eos, max_tokens = model.config.eos_token_ids, model.config.max_position_embeddings - len(prompt)
    output: list[int] = []
    generator, num_computed = Random(params.seed), 0
    try:
        while not output or not finish_reason(output, params, eos, min(params.max_tokens, max_tokens)):
            tokens = [*prompt, *output]
            batch = Batch.pack([(seq_id, tokens[num_computed:], num_computed)], model.device)
            logits = adjust(model(batch, store), [params], [prompt], [output], eos)
            num_computed = len(tokens) if store.keeps_kv else 0
            output += sample(logits, [params], [generator])
            yield output[-1]
    finally:
        store.free(seq_id)


def check_prompt(prompt: Sequence[int], config: ModelConfig) -> None:
    """Raises InvalidPrompt, or RequestTooLong when no token of the context is left to generate."""
    if isinstance(prompt, Sequence) and len(prompt) == 0:
        raise InvalidPrompt("The prompt is empty; a model needs at least one token to go on from.")
    bytes_like = isinstance(prompt, (str, bytes, bytearray, memoryview))
    integers = (
        isinstance(prompt, Sequence)
        and not bytes_like
        and all(isinstance(t, Integral) and not isinstance(t, bool) for t in prompt)
    )
    if not integers:
        raise InvalidPrompt(
            "The prompt must be a list of token ids (whole numbers); encode text with the tokenizer first."
        )
    for at, token in enumerate(prompt):
        if not 0 <= token < config.vocab_size:
            raise InvalidPrompt(
                f"Token id {token} at place {at} of the prompt is outside the vocabulary; "
                f"ids run from 0 to {config.vocab_size - 1}. Is it this model's tokenizer's?"
            )
    if len(prompt) >= config.max_position_embeddings:
        raise RequestTooLong(
            f"The prompt has {len(prompt)} tokens and the model's longest context is "
            f"{config.max_position_embeddings}, of which one must be left to generate. Shorten the prompt."
        )


def check_params(params: SamplingParams, config: ModelConfig) -> None:
    """Raises InvalidOption where params name a token that the model does not have, or leave it none."""
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, name):
            if token >= config.vocab_size:
                raise InvalidOption(
                    f"{name} names token {token}; this model's ids run from 0 to {config.vocab_size - 1}."
                )
    if params.min_tokens and len({*stop_token_ids(params, config.eos_token_ids)}) >= config.vocab_size:
        raise InvalidOption(
            f"min_tokens={params.min_tokens} is not possible with these stop_token_ids: all of this model's "
            f"{config.vocab_size} tokens end the text, so none is left to begin it. Name fewer."
        )
