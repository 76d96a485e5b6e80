"""Above the chapters: the forms that prompts, conversations and params may have, brought into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from minivllm.errors import InvalidOption, InvalidPrompt
from minivllm.model.tokenizer import Tokenizer
from minivllm.params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


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


def parse(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, Sequence[int]]:
    """A prompt's text, where it is given as text, and its token ids."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            keys = ", ".join(map(repr, prompt)) or "nothing"
            raise InvalidPrompt(f"A prompt's dictionary has 'prompt' or 'prompt_token_ids', not {keys}.")
        if "prompt_token_ids" in prompt:
            return None, prompt["prompt_token_ids"]
        prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise InvalidPrompt(f"'prompt' must be a text, not {type(prompt).__name__}.")
    return (prompt, tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, prompt)


def params_for(params: Params, n: int) -> list[SamplingParams]:
    """One SamplingParams for each of n prompts."""
    if isinstance(params, Sequence) and not isinstance(params, str):
        each = list(params)
    else:
        each = [SamplingParams() if params is None else params] * n
    for p in each:
        if not isinstance(p, SamplingParams):
            raise InvalidOption(
                f"params must be SamplingParams, or one for each prompt, not {type(p).__name__}."
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
