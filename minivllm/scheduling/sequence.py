"""Chapter 6: a sequence: one answer to a request as it grows.

One count says all about its progress: `num_computed_tokens`, the tokens whose keys and values are in memory.
Prompt, output, first step, preempted and begun again: a scheduler only ever sees to it that this count
catches up with the tokens there are.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random

from minivllm.outputs import Logprob


@dataclass(eq=False)
class Sequence:
    """One answer: the prompt, what has been generated, and how much of both is computed.

    token_ids: prompt and output so far; an array, so that a part of them is one copy of bytes.
    index: which of the request's answers it is. generator: its own source of chance, so that its neighbours
    do not matter. finish_reason: "stop" after a token or string that stops, "length", "abort"; None before.
    num_recomputed_to: it had so many tokens in memory when it last lost them.
    """

    seq_id: int
    index: int
    token_ids: array[int]
    num_prompt_tokens: int
    generator: Random
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_recomputed_to: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _number: float | None = None  # drawn for its next token

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.token_ids)

    def random(self) -> float:
        """Its random number for its next token; until it takes one the same, however often a step fails."""
        if self._number is None:
            self._number = self.generator.random()
        return self._number

    def append(self, token: int) -> None:
        """Take a generated token."""
        self._number = None
        self.token_ids.append(token)
        self.output_token_ids.append(token)

    def fork(self, seq_id: int) -> Sequence:
        """Another sequence with the same tokens, as a beam that goes on in two ways."""
        return Sequence(
            seq_id,
            self.index,
            self.token_ids[:],
            self.num_prompt_tokens,
            self.generator,
            list(self.output_token_ids),
            num_computed_tokens=self.num_computed_tokens,
        )
