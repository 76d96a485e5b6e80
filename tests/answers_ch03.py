"""Answers to the exercises of chapter 3: right ones built differently, wrong ones with the mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.errors import OutOfBlocks
from minivllm.memory.blocks import BlockPool


def pool(allocate: Callable[..., Any]) -> type[BlockPool]:
    return type("Mine", (BlockPool,), {"allocate": allocate})


def append_then_refuse(self, n):
    taken = []
    for _ in range(n):
        if not self._free:
            raise OutOfBlocks("too few")
        taken.append(self._free.popitem(last=False)[0])
    return taken


def never_refuse(self, n):
    return [self._free.popitem(last=False)[0] for _ in range(min(n, len(self._free)))]


def last_first(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return [self._free.popitem()[0] for _ in range(n)]


def pairs(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return [self._free.popitem(last=False) for _ in range(n)]


def only_looked(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return list(self._free)[:n]


def looked_then_deleted(self, n):
    """Right, in another way."""
    if len(self._free) - n < 0:
        raise OutOfBlocks("too few")
    taken = [block for _, block in zip(range(n), self._free, strict=False)]
    for block in taken:
        del self._free[block]
    return taken


def one_by_one(table, size, start, end):
    """Right, in another way."""
    slots = []
    for token in range(start, end):
        block, offset = divmod(token, size)
        slots.append(table[block] * size + offset)
    return slots


def one_too_many(t, b, s, e):
    return [t[i // b] * b + i % b for i in range(s, e + 1) if i // b < len(t)]


def from_the_start(t, b, s, e):
    return [t[i // b] * b + i % b for i in range(e - s)]


# exercise -> right answers, none of them the package's own
RIGHT: dict[str, list[Any]] = {"3.1": [one_by_one], "3.2": [pool(looked_then_deleted)]}

# (exercise, answer, what the message must say of the mistake)
WRONG: list[tuple[str, Any, str]] = [
    ("3.1", one_too_many, "end is not included"),
    ("3.1", from_the_start, "from the start of the sequence"),
    ("3.1", lambda t, b, s, e: [t[0] * b + i for i in range(s, e)], "side by side"),
    ("3.1", lambda t, b, s, e: [t[i // b] + i % b * b for i in range(s, e)], "changed places"),
    ("3.1", lambda t, b, s, e: None, "expected"),
    ("3.2", pool(append_then_refuse), "before the refusal"),
    ("3.2", pool(never_refuse), "OutOfBlocks"),
    ("3.2", pool(last_first), "given back last"),
    ("3.2", pool(pairs), "not pairs"),
    ("3.2", pool(only_looked), "still count as free"),
]  # fmt: skip
