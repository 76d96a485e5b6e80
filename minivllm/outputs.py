"""Chapter 0: what comes back for a prompt: text, tokens, why it ended, and how long it took.

Names are vLLM's, so that code which reads them can be carried over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Logprob:
    """How likely a token was: its log-probability, and its rank among all tokens (1: the likeliest).

    Both are of the model's own distribution, before penalties, bias and temperature, as vLLM reports them.
    """

    logprob: float
    rank: int


@dataclass
class RequestMetrics:
    """When things happened to one request, in seconds on one clock; a figure not yet known is None.

    The definitions are those of vLLM's `vllm bench serve` (vllm/benchmarks/serve.py) and, for the queue,
    of its request metrics (docs/design/metrics.md); every table of this project takes them from here.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def queue_time(self) -> float | None:
        """From arrival until the first step that it took part in."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, counted from arrival, so the wait in the queue is part of it."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gap before each token after the first."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: the mean of the gaps. One token has no gap."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps > 0 else None

    @property
    def e2e_latency(self) -> float | None:
        """From arrival to the last token so far."""
        return self.token_times[-1] - self.arrival_time if self.token_times else None


@dataclass(frozen=True)
class SharingReport:
    """What it took to keep the continuations of one prompt: the most blocks at once, and copies in all.

    num_blocks: blocks that they had together, a shared one counted once. num_blocks_without_sharing: blocks
    that they would have had, each on its own. num_copies: blocks copied because one of several was about
    to write.
    """

    num_blocks: int = 0
    num_blocks_without_sharing: int = 0
    num_copies: int = 0

    def after(self, num_blocks: int, num_blocks_without_sharing: int, num_copies: int) -> SharingReport:
        """The report with one more step: what was held in it, and the copies that it made."""
        return SharingReport(
            max(self.num_blocks, num_blocks),
            max(self.num_blocks_without_sharing, num_blocks_without_sharing),
            self.num_copies + num_copies,
        )


@dataclass
class CompletionOutput:
    """One continuation of a prompt.

    finish_reason: "stop", "length" or "abort"; None while it goes on. stop_reason: the stop string or
    stop token id that ended it; None for the model's own end-of-sequence token. A stop token stands in
    token_ids but not in text; a stop string's tokens stand in token_ids, and the text ends before it.
    logprobs: for each token, the requested log-probabilities by token id, the chosen token's among them.
    cumulative_logprob: the sum of the chosen tokens' log-probabilities. score: of a beam search, what its
    results are ranked by: cumulative_logprob / length ** length_penalty.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass
class RequestOutput:
    """All that is known of one request; text and tokens are those so far, from the start.

    prompt: its text, None when it was given as token ids. metrics: of a request with several outputs, a token
    time is that of a step that gave it tokens. num_cached_tokens: prompt tokens that were in memory already
    when it first began, through the prefix cache. sharing: what several outputs of one prompt shared; None
    where nothing could be shared.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    sharing: SharingReport | None = None
