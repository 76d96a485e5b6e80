"""Chapter 6: a request: what was asked, how far it has come, and why it ended.

One count says all about its progress: `num_computed_tokens`, the tokens whose keys and values are in
memory. Prompt, output, first step, preempted and begun again: a scheduler only ever sees to it that
this count catches up with the tokens there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from minivllm.params import SamplingParams


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and what has been generated for it.

    finish_reason: "stop" after an end-of-sequence token, "length" after max_tokens, "abort"; None before.
    num_preemptions counts how often it lost its memory and began again.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: Sequence[int] = ()
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def longest(self) -> int:
        """Tokens in memory at the most; the last token's key and value are never needed."""
        return len(self.prompt_token_ids) + self.params.max_tokens - 1

    def new_token_ids(self) -> list[int]:
        """The tokens that are not computed yet."""
        return [*self.prompt_token_ids, *self.output_token_ids][self.num_computed_tokens :]

    def append(self, token: int) -> None:
        """Take a generated token, and finish where it or the length says so."""
        self.output_token_ids.append(token)
        if token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish("stop")
        elif len(self.output_token_ids) == self.params.max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End for this reason."""
        self.status, self.finish_reason = Status.FINISHED, reason
