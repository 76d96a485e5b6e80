"""Chapter 5: three hit rates of a prefix cache, which are often taken for one another.

Two requests come after a prompt of 8 tokens was cached, block_size 4: one of 10 tokens that begins with it,
and a strange one of 3.

    by blocks      2 of 2 full blocks      1.00      what could have hit did
    by tokens      8 of 13 tokens          0.62      what the model need not compute
    by requests    1 of 2 requests         0.50      who was helped at all
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Counts over all requests, each at its first admission: what was asked for, and what was found."""

    num_blocks: int = 0
    num_hit_blocks: int = 0
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_requests: int = 0
    num_hit_requests: int = 0

    def record(self, num_tokens: int, num_hit_blocks: int, block_size: int) -> None:
        """Count a request of num_tokens tokens, whose first num_hit_blocks blocks were found.

        Once for each request: a request that is admitted again after preemption finds its own blocks.
        """
        self.num_blocks += num_tokens // block_size
        self.num_hit_blocks += num_hit_blocks
        self.num_tokens += num_tokens
        self.num_hit_tokens += num_hit_blocks * block_size
        self.num_requests += 1
        self.num_hit_requests += num_hit_blocks > 0

    @property
    def block_hit_rate(self) -> float | None:
        """Blocks found / full blocks of the prompts; None when there was none.

        A prompt of k full blocks and no more finds k - 1 at best, since one token must be computed.
        """
        return self.num_hit_blocks / self.num_blocks if self.num_blocks else None

    @property
    def token_hit_rate(self) -> float | None:
        """Tokens in the blocks found / all tokens of the prompts, full blocks or not; None without any."""
        return self.num_hit_tokens / self.num_tokens if self.num_tokens else None

    @property
    def request_hit_rate(self) -> float | None:
        """Requests that found at least one block / all requests; None without any."""
        return self.num_hit_requests / self.num_requests if self.num_requests else None
