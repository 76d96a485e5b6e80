"""Above the chapters: the checks of chapter 3: a reader's answers against plain models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from minivllm.course.checking import CheckFailed, expect, refuses
from minivllm.course.checks.ch03_tensors import check_3_5 as check_3_5
from minivllm.course.checks.ch03_tensors import check_3_6 as check_3_6
from minivllm.errors import OutOfBlocks
from minivllm.memory.blocks import BlockPool
from minivllm.memory.paged import PagedManager

# (exercise, what was changed, as `make gate` prints it) -> why the changed answer is as right as the first
EQUIVALENT: dict[tuple[str, str], str] = {
    ("3.3", "line 7: 'wrong or list(block_ids)', change 1"): "Only the words of the refusal change.",
    ("3.4", "line 10: '0', change 2"): "The larger of n and -1 is n: no sequence has fewer than 0 tokens.",
    ("3.6", "line 27: 'if seq_len == 0:', change 2"): "Attention over no keys gives zeros by itself.",
    ("3.6", "line 27: '0', change 2"): "The same: the special case only says so in plain words.",
}


def check_3_1(slot_mapping: Callable[..., Any]) -> None:
    """Blocks in any order, odd sizes, any part of a sequence."""
    random = Random(31)
    _slots(slot_mapping, [7, 2, 5], 4, 6, 10)  # room behind: one token too many has a slot too
    for block_size in (1, 3, 4, 7, 16):
        for _ in range(20):
            num_tokens = random.randint(1, 5 * block_size)
            table = random.sample(range(100, 200), -(-num_tokens // block_size))
            start = random.randint(0, num_tokens)
            _slots(slot_mapping, table, block_size, start, random.randint(start, num_tokens))


def _slots(slot_mapping: Callable[..., Any], table: list[int], block_size: int, start: int, end: int) -> None:
    places = [block * block_size + offset for block in table for offset in range(block_size)]
    what, handed = f"slot_mapping({table}, {block_size}, {start}, {end})", list(table)
    got = slot_mapping(handed, block_size, start, end)
    kinds = {type(slot).__name__ for slot in got} - {"int"} if isinstance(got, list) else set()
    if kinds:
        raise CheckFailed(f"{what}: a list of whole numbers (int) is wanted, got numbers of {sorted(kinds)}.")
    expect(
        what,
        got,
        places[start:end],
        {
            "the last token's slot is missing or one too many is there: end is not included": (
                places[start : end + 1],
                *([places[start : end - 1]] if end - start > 1 else []),
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
    expect("the block table after the call: it belongs to the sequence", handed, table)


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


def check_3_3(answer: type[BlockPool]) -> None:
    """Blocks come back in any order; a wrong one among them, at any place, must leave all as it was."""
    random = Random(33)
    for num_blocks in (13, 5, 2, 1):
        for _ in range(25):
            pool = answer(num_blocks)
            in_use = pool.allocate(random.randint(1, num_blocks))
            queue = [block for block in range(num_blocks) if block not in in_use]
            random.shuffle(in_use)
            back = in_use[: random.randint(1, len(in_use))]
            for wrong in _wrong_lists(random, num_blocks, back, queue):
                what = f"free({wrong}) of {num_blocks} blocks with {sorted(in_use)} in use"
                refuses(what, ValueError, pool.free, list(wrong))
                _expect_queue(f"the free blocks after {what} was refused", pool, num_blocks, queue)
            handed = list(back)
            pool.free(handed)
            expect("the list that free was given, after the call", handed, back)
            _expect_queue(
                f"the free blocks after free({back}) with {queue} free before, longest free first",
                pool,
                num_blocks,
                queue + back,
                {
                    "the blocks stand in the queue the other way round; the order is the caller's": (
                        queue + back[::-1],
                    ),
                    "they stand at the head: what has just been freed would be handed out first": (
                        back + queue,
                        back[::-1] + queue,
                    ),
                    "the queue was put in order of number: a pool keeps no such order": (
                        sorted(queue + back),
                    ),
                },
            )


def _wrong_lists(random: Random, num_blocks: int, back: list[int], queue: list[int]) -> list[list[int]]:
    """Lists that free must refuse: a block that is free, twice the same, one that the pool never had."""
    never = [num_blocks, num_blocks + 3, -1, -num_blocks]
    return [
        [*back, back[0]],
        *(
            [*back[:place], one, *back[place:]]
            for place in (0, len(back) // 2, len(back))
            for one in [*never, *random.sample(queue, min(1, len(queue)))]
        ),
    ]


def _expect_queue(
    what: str,
    pool: BlockPool,
    num_blocks: int,
    expected: list[int],
    mistakes: Mapping[str, Sequence[list[int]]] | None = None,
) -> None:
    """The queue as the pool's own allocate would hand it out, looked at without changing it."""
    got = list(pool._free)
    some = {"some blocks are back, though one was wrong: all or nothing": [got]} if len(got) else {}
    expect(what, got, expected, mistakes if mistakes is not None else some)
    expect(f"is_free of each block of {num_blocks}, {what}", _free_ones(pool, num_blocks), sorted(expected))


def _free_ones(pool: BlockPool, num_blocks: int) -> list[int]:
    return [block for block in range(num_blocks) if pool.is_free(block)]


def check_3_4(answer: type[PagedManager]) -> None:
    """Sequences that grow, lengths about the edges of blocks, a pool that is often too small."""
    random = Random(34)
    small, has = answer(9, 4, bytes_per_token=1), dict[int, int]()
    for seq_id, n in ((3, 5), (3, 6), (3, 2), (7, 1), (3, 9), (11, 50), (3, 50)):
        _allocate(small, 4, has, seq_id, n)
    for block_size in (7, 4, 3, 1):
        for num_blocks in (40, 9, 4, 1):
            manager = answer(num_blocks, block_size, bytes_per_token=1)
            tokens: dict[int, int] = {}
            for _ in range(60):
                seq_id = random.choice([3, 7, 11])
                n = max(0, random.randint(0, min(num_blocks, 9)) * block_size + random.choice([-1, 0, 1]))
                if random.random() < 0.2:
                    manager.free(seq_id)
                    tokens.pop(seq_id, None)
                else:
                    _allocate(manager, block_size, tokens, seq_id, n)


def _allocate(manager: PagedManager, block_size: int, tokens: dict[int, int], seq_id: int, n: int) -> None:
    """One allocation, which works or is refused, and all books after it."""
    before, counts, free = _books(manager), dict(manager._num_tokens), manager.pool.num_free_blocks
    had = -(-tokens.get(seq_id, 0) // block_size)
    missing = max(0, -(-n // block_size) - had)
    what = (
        f"allocate({seq_id}, {n}) with blocks of {block_size}, {free} of them free, and "
        f"{tokens.get(seq_id, 0)} tokens in {had} blocks before"
    )
    if missing > free:
        refuses(what, OutOfBlocks, manager.allocate, seq_id, n)
        tables = [(i, list(table)) for i, table in manager._tables.items()]
        was = [(i, table) for i, (_, table) in before.items()]
        mistake = {"the refusal left something behind: all or nothing": [tables, manager._num_tokens]}
        expect(f"(id, block table) of each sequence after {what}", tables, was, mistake)
        expect(f"self._num_tokens after {what}", manager._num_tokens, counts, mistake)
        expect(
            f"free blocks after {what}",
            manager.pool.num_free_blocks,
            free,
            dict.fromkeys(mistake, range(free)),
        )
        return
    try:
        manager.allocate(seq_id, n)
    except OutOfBlocks as error:
        raise CheckFailed(f"{what}: refused, though {missing} more are enough. It said: {error}") from None
    expect(
        f"the number of blocks taken by {what}",
        free - manager.pool.num_free_blocks,
        missing,
        {
            "the blocks it had before were taken once more: n is the tokens in all": [missing + had],
            "n was taken for new tokens; it is the tokens in all": (
                [-(-(tokens[seq_id] + n) // block_size) - had] if tokens.get(seq_id) else []
            ),
            "the last, partly filled block is missing: round up": [max(0, n // block_size - had)],
            "a full block was taken for a begun one: n tokens need no room for the next": [
                max(0, n // block_size + 1 - had)
            ],
        },
    )
    tokens[seq_id] = max(n, tokens.get(seq_id, 0))
    _expect_books(f"after {what}", manager, before, tokens, seq_id, n)


def _books(manager: PagedManager) -> dict[int, tuple[int, list[int]]]:
    """(tokens, block table) of each sequence. Raises CheckFailed where one has no number of tokens."""
    try:
        return {s.seq_id: (s.used, list(s.block_ids)) for s in manager.snapshot().sequences}
    except KeyError as error:
        raise CheckFailed(
            f"Sequence {error} has a table, and its tokens are not in self._num_tokens."
        ) from None


def _expect_books(
    when: str,
    manager: PagedManager,
    before: dict[int, tuple[int, list[int]]],
    tokens: dict[int, int],
    seq_id: int,
    n: int,
) -> None:
    books = _books(manager)
    expect(
        f"the tokens of each sequence {when}",
        {i: used for i, (used, _) in sorted(books.items())},
        dict(sorted(tokens.items())),
        {
            "the sequence has shrunk; it keeps the tokens that it had": [{**tokens, seq_id: n}],
            "n was taken for new tokens; it is the tokens in all": (
                [{**tokens, seq_id: before[seq_id][0] + n}] if seq_id in before else []
            ),
        },
    )
    order = {"a sequence that grows keeps its place": [[*(i for i in tokens if i != seq_id), seq_id]]}
    expect(f"the sequences {when}, in the order in which they came", list(books), list(tokens), order)
    expect(f"the sequences in self._num_tokens {when}", sorted(manager._num_tokens), sorted(tokens))
    for i, (_, table) in before.items():
        now = books[i][1]
        in_front = [now[: len(table)]] if now[len(now) - len(table) :] == table else []
        mistake = {"new blocks were put in front; a table is in the order of its tokens": in_front}
        expect(f"the first blocks of sequence {i}'s table {when}", now[: len(table)], table, mistake)
    try:
        manager.check_integrity()
    except AssertionError as error:
        raise CheckFailed(
            f"The books do not balance {when}: {error or 'too few or too many blocks'}."
        ) from None
