"""Chapter 7: one token budget for a step; a prompt may be computed in chunks.

With whole prompts a step is as long as its longest prompt, and all who are decoding wait for it. Here a step
computes at most max_num_batched_tokens tokens, whoever they belong to:

    budget 8         running: a and b decode, c has 5 of its 12 prompt tokens; d waits with 9
    step             a 1, b 1, c 6                     the budget is used up; c has one token left
    next             a 1, b 1, c 1 (its first token comes), d 5

There is no prefill phase and no decode phase: each request's num_computed_tokens catches up with the tokens
it has, running requests first, then waiting ones (Sarathi-Serve, OSDI '24; vLLM V1's scheduler).
"""

from __future__ import annotations

from typing import Any

from minivllm.errors import InvalidOption
from minivllm.memory.manager import KVManager
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.request import Request


class ChunkedScheduler(ContinuousScheduler):
    """As continuous batching, with a budget of tokens for each step.

    long_prefill_token_threshold: most tokens of one request in a step, though one for each of its sequences,
    so that a long prompt leaves budget for others; None: the budget alone. prefer_prefill: prompts before
    decodes, as engines without chunks often do. It shows what starvation is: while prompts keep coming, those
    who decode get nothing; and a prompt may be admitted and give way again in one step, when those who decode
    then need its blocks.

    A request's memory is taken when it is admitted, for its whole prompt: chunks of two prompts could
    otherwise each hold what the other needs to go on. vLLM takes it chunk by chunk, and preempts one of two.
    """

    def __init__(
        self,
        manager: KVManager,
        max_num_seqs: int,
        watermark: int = 0,
        *,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int | None = None,
        prefer_prefill: bool = False,
        **options: Any,
    ):
        super().__init__(manager, max_num_seqs, watermark, **options)
        for name, value in (
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("long_prefill_token_threshold", long_prefill_token_threshold),
        ):
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value} is not possible: it must be at least 1.")
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.prefer_prefill = prefer_prefill

    def check(self, request: Request) -> None:
        """Raises InvalidOption or RequestTooLong for a request that could never run, even alone."""
        super().check(request)
        if request.width > self.max_num_batched_tokens:
            raise InvalidOption(
                f"The request has {request.width} sequences, which get their tokens in one step, and "
                f"max_num_batched_tokens={self.max_num_batched_tokens}. Ask for fewer, or raise it."
            )

    def _plan(self, output: SchedulerOutput) -> None:
        if not self.prefer_prefill:
            super()._plan(output)
            return
        prefilling = [request for request in self.running if _is_prefilling(request)]
        decoding = [request for request in self.running if not _is_prefilling(request)]
        self._continue(prefilling, output)
        self._admit(output)
        self._continue(decoding, output)

    def _limit(self, request: Request, output: SchedulerOutput) -> int:
        """Most tokens that a request may compute in this step."""
        left = self.max_num_batched_tokens - output.num_tokens
        if self.long_prefill_token_threshold is None:
            return left
        return min(left, max(self.long_prefill_token_threshold, request.num_seqs))


def _is_prefilling(request: Request) -> bool:
    """Whether a request lacks more than the one token of each sequence that a decode computes."""
    return any(request.target(s) - s.num_computed_tokens > 1 for s in request.holders)
