"""Above the chapters: the checks of chapter 3: a reader's answers against plain models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from minivllm.course.checking import expect, refuses
from minivllm.errors import OutOfBlocks
from minivllm.memory.blocks import BlockPool

# (exercise, what was changed, as `make gate` prints it) -> why the changed answer is as right as the first
EQUIVALENT: dict[tuple[str, str], str] = {}


def check_3_1(slot_mapping: Callable[..., Any]) -> None:
    """Blocks in any order, odd sizes, any part of a sequence."""
    random = Random(31)
    for block_size in (1, 3, 4, 7, 16):
        for _ in range(20):
            num_tokens = random.randint(1, 5 * block_size)
            table = random.sample(range(100, 200), -(-num_tokens // block_size))
            start = random.randint(0, num_tokens)
            end = random.randint(start, num_tokens)
            places = [block * block_size + offset for block in table for offset in range(block_size)]
            what = f"slot_mapping({table}, {block_size}, {start}, {end})"
            got = slot_mapping(table, block_size, start, end)
            expect(
                what,
                got,
                places[start:end],
                {
                    "the last token's slot is missing or one too many is there: end is not included": (
                        places[start : end + 1],
                        places[start : max(end - 1, start)],
                    ),
                    "these are the slots from the start of the sequence, not from token `start`": (
                        places[: end - start],
                    ),
                    "the blocks seem to lie side by side; each block's place stands in the table": (
                        [table[0] * block_size + i for i in range(start, end)],
                    ),
                    "block and offset have changed places": (
                        [i % block_size * block_size + table[i // block_size] for i in range(start, end)],
                    ),
                },
            )


def check_3_2(answer: type[BlockPool]) -> None:
    """Against a plain queue, with frees between, down to the last block and beyond it."""
    random = Random(32)
    for num_blocks in (1, 2, 5, 13):
        pool = answer(num_blocks)
        queue: list[int] = list(range(num_blocks))
        in_use: list[int] = []
        for _ in range(60):
            n = random.randint(0, num_blocks + 2)
            if n > len(queue):
                refuses(f"allocate({n}) with {len(queue)} free blocks", OutOfBlocks, pool.allocate, n)
                expect(
                    f"the number of free blocks after allocate({n}) was refused",
                    pool.num_free_blocks,
                    len(queue),
                    {"blocks were taken before the refusal: all or nothing": range(len(queue))},
                )
            else:
                _expect_blocks(pool.allocate(n), n, queue, in_use)
                in_use += queue[:n]
                del queue[:n]
                expect(
                    "the number of free blocks",
                    pool.num_free_blocks,
                    len(queue),
                    {
                        "blocks that were handed out still count as free": range(
                            len(queue) + 1, num_blocks + 1
                        ),
                    },
                )
            back = random.sample(in_use, random.randint(0, len(in_use)))
            pool.free(back)
            queue += back
            in_use = [block for block in in_use if block not in back]


def _expect_blocks(got: Any, n: int, queue: Sequence[int], in_use: Sequence[int]) -> None:
    expect(
        f"allocate({n}) with {list(queue)} free, longest free first",
        got,
        list(queue[:n]),
        {
            "these are the blocks given back last; a block should keep its contents as long as possible": (
                list(queue[len(queue) - n :]),
                list(queue[len(queue) - n :])[::-1],
            ),
            "one of these blocks is in use": [got]
            if isinstance(got, list) and set(got) & set(in_use)
            else [],
            "a list of block numbers is wanted, not pairs": [[(block, None) for block in queue[:n]]],
        },
    )
