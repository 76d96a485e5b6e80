"""Above the chapters: what attention is asked for in a layer, and the least that it must move for it.

A kernel's own traffic (`kernel_traffic`) is compared with the least: each key, value and query read once,
each output written once. What lies between the two is read more than once.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.errors import InvalidOption


@dataclass(frozen=True)
class Work:
    """What attention is asked for in one layer: for each sequence its tokens, and how many are queries.

    itemsize: bytes of a number. Raises InvalidOption for lengths and heads that do not go together.
    """

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    itemsize: int = 2

    def __post_init__(self) -> None:
        pairs = list(zip(self.seq_lens, self.query_lens, strict=False))
        paired = len(self.seq_lens) == len(self.query_lens) > 0
        if not paired or any(queries < 1 or 0 < n < queries for n, queries in pairs):
            raise InvalidOption(
                f"seq_lens={self.seq_lens} and query_lens={self.query_lens} are not possible: each sequence "
                "needs both, from 1 query up to as many as it has tokens."
            )
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InvalidOption(
                f"num_heads={self.num_heads} is not possible with num_kv_heads={self.num_kv_heads}: it must "
                "be a multiple of it."
            )

    @property
    def num_tokens(self) -> int:
        """Query tokens of all sequences."""
        return sum(self.query_lens)

    def seen(self, queries: int = 1) -> list[int]:
        """How many keys the last query of a tile sees, for each tile of so many queries of a sequence."""
        return [
            max(0, n - query_len + min(first + queries, query_len))
            for n, query_len in zip(self.seq_lens, self.query_lens, strict=True)
            for first in range(0, query_len, queries)
        ]


@dataclass(frozen=True)
class Traffic:
    """Bytes of each kind, and floating-point operations: a multiply-add is two.

    kv, q, tables: read; out: written; parts_written, parts_read: what programs that share a sequence's keys
    leave for `triton_split.combine`. flops: of both products, for the whole of each tile. programs: how many
    are started for it; more of them keep more of a GPU busy.
    """

    kv: int
    q: int
    tables: int
    out: int
    parts_written: int
    parts_read: int
    flops: int
    programs: int = 0

    @property
    def num_bytes(self) -> int:
        """All that is read or written."""
        return self.kv + self.q + self.tables + self.out + self.parts_written + self.parts_read


def least_traffic(work: Work) -> Traffic:
    """What cannot be saved: each key, value, query and table entry read once, each output written once.

    Blocks that sequences share are counted for each. flops: of the keys that each query sees.
    """
    vectors = work.num_tokens * work.num_heads * work.head_dim
    return Traffic(
        kv=sum(work.seq_lens) * work.num_kv_heads * 2 * work.head_dim * work.itemsize,
        q=vectors * work.itemsize,
        tables=sum(-(-n // work.block_size) for n in work.seq_lens) * 4,
        out=vectors * work.itemsize,
        parts_written=0,
        parts_read=0,
        flops=sum(work.seen()) * work.num_heads * 4 * work.head_dim,
    )
