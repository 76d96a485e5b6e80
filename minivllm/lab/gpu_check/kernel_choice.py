"""Above the chapters: what the last kernel chooses for a call, and calls for which something else is chosen.

The kernel chooses by two functions, `attention_tile` and `choose_num_splits`. Here they are watched, and
answered otherwise, for as long as a `with` lasts; all else is as in any other call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock


@contextmanager
def choosing(other: Mapping[str, int] | None = None) -> Iterator[dict[str, int]]:
    """What is in `other` is chosen: a size of the tile, "num_warps", "num_stages", "num_splits".

    Yields what was chosen in the last call, the kernel's own and this together.
    """
    attention: Any = import_module("minivllm.kernels.triton_attention")
    own_tile, own_splits = attention.attention_tile, attention.choose_num_splits
    sizes = dict(other or {})
    num_splits = sizes.pop("num_splits", None)
    chosen: dict[str, int] = {}

    def attention_tile(query_len: int, group: int, *rest: Any) -> dict[str, int]:
        tile = own_tile(query_len, group, *rest) | sizes
        tile["BLOCK_Q"] = tile["BLOCK_M"] // group
        chosen.update(tile, num_splits=1)
        return tile

    def choose_num_splits(*arguments: Any) -> int:
        chosen["num_splits"] = num_splits or own_splits(*arguments)
        return chosen["num_splits"]

    with mock.patch.multiple(attention, attention_tile=attention_tile, choose_num_splits=choose_num_splits):
        yield chosen
