"""Above the chapters: the forms that prompts, conversations and params may have, brought into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias, TypeVar

from minivllm.errors import InvalidOption, InvalidPrompt
from minivllm.model.tokenizer import Tokenizer
from minivllm.params import BeamSearchParams, SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
P = TypeVar("P", SamplingParams, BeamSearchParams)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of prompts; a list of whole numbers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise InvalidPrompt(
            f"A prompt must be a text, a list of token ids, or a dictionary, not {type(prompts).__name__}."
        )
    one = len(prompts) > 0 and isinstance(prompts[0], Integral)
    return [prompts] if one else list(prompts)  # type: ignore[list-item, arg-type]


class ParsedPrompt(NamedTuple):
    """A prompt's text, where it is given as text; its token ids; its cache salt."""

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None


def parse(prompt: Prompt, tokenizer: Tokenizer) -> ParsedPrompt:
    """Bring a prompt of any form into one."""
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, str):
            return ParsedPrompt(prompt, tokenizer.encode(prompt))
        return ParsedPrompt(None, prompt)
    found = set(prompt) - {"cache_salt"}
    if len(found) != 1 or not found <= {"prompt", "prompt_token_ids"}:
        keys = ", ".join(map(repr, prompt)) or "nothing"
        raise InvalidPrompt(
            f"A prompt's dictionary has 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt', not {keys}."
        )
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise InvalidPrompt(f"'cache_salt' must be a text that is not empty, not {salt!r}.")
    if "prompt_token_ids" in prompt:
        return ParsedPrompt(None, prompt["prompt_token_ids"], salt)
    text = prompt["prompt"]
    if not isinstance(text, str):
        raise InvalidPrompt(f"'prompt' must be a text, not {type(text).__name__}.")
    return ParsedPrompt(text, tokenizer.encode(text), salt)


def params_for(params: Params, n: int) -> list[SamplingParams]:
    """One SamplingParams for each of n prompts."""
    if isinstance(params, BeamSearchParams):
        raise InvalidOption("BeamSearchParams are for beam_search; generate takes SamplingParams.")
    return _for_each(SamplingParams() if params is None else params, n, SamplingParams)


def beam_params_for(params: BeamSearchParams | Sequence[BeamSearchParams], n: int) -> list[BeamSearchParams]:
    """One BeamSearchParams for each of n prompts."""
    if isinstance(params, SamplingParams):
        raise InvalidOption(
            f"A beam search takes BeamSearchParams, not SamplingParams (n={params.n}): "
            "its beam_width says how many continuations come back."
        )
    return _for_each(params, n, BeamSearchParams)


def priorities_for(priority: int | Sequence[int] | None, n: int) -> list[int]:
    """One priority for each of n prompts; the lower number comes first."""
    each = list(priority) if isinstance(priority, Sequence) else [priority or 0] * n
    for p in each:
        if not isinstance(p, Integral) or isinstance(p, bool):
            raise InvalidOption(
                f"priority={p!r} is not possible: it must be a whole number, or one for each."
            )
    if len(each) != n:
        raise InvalidOption(f"{len(each)} priorities do not match {n} prompts: give one for each.")
    return [int(p) for p in each]


def _for_each(params: Any, n: int, kind: type[P]) -> list[P]:
    each = list(params) if isinstance(params, Sequence) and not isinstance(params, str) else [params] * n
    for p in each:
        if not isinstance(p, kind):
            raise InvalidOption(
                f"params must be {kind.__name__}, or one for each prompt, not {type(p).__name__}."
            )
    if len(each) != n:
        raise InvalidOption(
            f"{len(each)} params do not match {n} prompts: give one for all, or one for each."
        )
    return each


def conversations(messages: Any) -> list[list[Mapping[str, str]]]:
    """One conversation or several as a list of conversations, each message checked."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidPrompt('A conversation is a list such as [{"role": "user", "content": "Hello"}].')
    many: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for conversation in many:
        right = isinstance(conversation, Sequence) and not isinstance(conversation, str) and conversation
        for message in conversation if right else [None]:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise InvalidPrompt(
                    f"A message is a dictionary with texts for 'role' and 'content', not {message!r}."
                )
    return many
