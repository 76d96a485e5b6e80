"""Chapter 6: a request: what was asked, how far it has come, and why it ended.

One count says all about its progress: `num_computed_tokens`, the tokens whose keys and values are in
memory. Prompt, output, first step, preempted and begun again: a scheduler only ever sees to it that
this count catches up with the tokens there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from minivllm.decoding.stopping import finish_reason
from minivllm.outputs import Logprob, RequestMetrics
from minivllm.params import SamplingParams


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and what has been generated for it.

    max_model_len: most tokens that prompt and output may have together; None: as many as params say.
    generator: the request's own source of chance, so that its neighbours do not matter.
    finish_reason: "stop" after a token or string that stops, "length", "abort"; None before.
    num_preemptions counts how often it lost its memory and began again.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_token_ids: Sequence[int] = ()
    max_model_len: int | None = None
    generator: Random = field(default_factory=Random)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_tokens(self) -> int:
        """Most tokens that it may generate."""
        if self.max_model_len is None:
            return self.params.max_tokens
        return min(self.params.max_tokens, self.max_model_len - len(self.prompt_token_ids))

    @property
    def longest(self) -> int:
        """Tokens in memory at the most; the last token's key and value are never needed."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    def new_token_ids(self) -> list[int]:
        """The tokens that are not computed yet."""
        prompt, computed = self.prompt_token_ids, self.num_computed_tokens
        if computed >= len(prompt):
            return self.output_token_ids[computed - len(prompt) :]
        return [*prompt[computed:], *self.output_token_ids]

    def append(self, token: int) -> None:
        """Take a generated token, and finish where it or the length says so."""
        self.output_token_ids.append(token)
        reason = finish_reason(self.output_token_ids, self.params, self.eos_token_ids, self.max_tokens)
        if reason is not None:
            self.finish(reason, token if reason == "stop" and token in self.params.stop_token_ids else None)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End for this reason."""
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, reason, stop_reason
