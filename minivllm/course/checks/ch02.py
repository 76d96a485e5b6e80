"""Above the chapters: the checks of chapter 2: a reader's answers against plain models."""

from __future__ import annotations

from inspect import getattr_static
from random import Random
from typing import TypeAlias

from minivllm.course.checking import CheckFailed, expect, refuses
from minivllm.course.checks.ch02_slots import check_2_4 as check_2_4
from minivllm.course.checks.ch02_slots import check_2_5 as check_2_5
from minivllm.errors import OutOfMemory
from minivllm.memory.buddy import BuddyAllocator

# (exercise, what was changed, as `make gate` prints it) -> why the changed answer is as right as the first
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "2.5",
        "line 7: 'True', change 1",
    ): "the two lists are always of one length; strict only guards against a slip",
}

Run: TypeAlias = tuple[int, int]  # start, length


def power_at_or_above(n: int) -> int:
    """The least power of two that is not below n, by doubling."""
    power = 1
    while power < n:
        power *= 2
    return power


def check_2_1(answer: type[BuddyAllocator]) -> None:
    """Every small number, and the neighbours of every power of two that a machine word holds."""
    if not isinstance(getattr_static(answer, "run_length"), staticmethod | classmethod):
        raise CheckFailed(
            "run_length is called without an allocator: write @staticmethod in the line above "
            "`def run_length(n)`, and no self."
        )
    near = [2**k + d for k in range(2, 63) for d in (-1, 0, 1)]
    for n in [*range(70), 1025, 15_728, *near]:
        right = power_at_or_above(n)
        expect(
            f"run_length({n})",
            answer.run_length(n),
            right,
            {
                "a request of 0 gets no slot; the shortest run is one slot": [0] if n == 0 else [],
                "floating point was used: it cannot tell a large number from the power of two beside it": (
                    [right // 2, 2 * right] if n > 2**40 and n != right else []
                ),
                "a number that is a power of two already was doubled": [2 * right] if n == right else [],
                "this is the power of two below; the request would not fit": [right // 2],
                "the request's own length came back, not a power of two": [n],
            },
        )


class PlainRuns:
    """The free runs as a sorted list, split and joined by hand."""

    def __init__(self, num_slots: int):
        self.free = BuddyAllocator(num_slots).free_runs
        self.used: dict[int, int] = {}  # start -> length

    def source(self, wanted: int) -> Run | None:
        """The free run that a run of `wanted` slots must be cut from."""
        fitting = [(length, start) for start, length in self.free if length >= wanted]
        return min(fitting)[::-1] if fitting else None

    def take(self, wanted: int) -> int:
        """Split the shortest run that fits, as a list would; returns its start."""
        start, length = self.source(wanted) or (0, 0)
        self.free.remove((start, length))
        while length > wanted:
            length //= 2
            self.free.append((start + length, length))
        self.free.sort()
        self.used[start] = wanted
        return start

    def joined(self, start: int, rule: str = "right") -> list[Run]:
        """The free runs once the one at start is given back, by the right rule or a mistaken one."""
        free, length, times = list(self.free), self.used[start], 0
        while rule != "never" and not (rule == "once" and times == 1):
            buddy = start ^ length
            partners = [(buddy, length)]
            if rule == "neighbour":
                partners = [(start - length, length), (start + length, length)]
            if rule == "any length":
                partners = [run for run in free if run[0] == buddy]
            partner = next((run for run in partners if run in free), None)
            if partner is None:
                break
            free.remove(partner)
            start, length, times = min(start, partner[0]), 2 * length, times + 1
        return sorted([*free, (start, length)])


def check_2_2(answer: type[BuddyAllocator]) -> None:
    """Pools of odd sizes, filled and emptied at random, down to the last run and beyond it."""
    random = Random(22)
    for num_slots in (1, 2, 13, 16, 37, 100):
        mine, plain = answer(num_slots), PlainRuns(num_slots)
        for _ in range(60):
            n = random.choice((0, 1, 2, 3, 5, 8, 11, random.randint(1, num_slots + 3)))
            _take(mine, plain, n)
            for start in random.sample(sorted(plain.used), len(plain.used) // 3):
                mine.free(start)
                plain.free = plain.joined(start)
                del plain.used[start]


def _take(mine: BuddyAllocator, plain: PlainRuns, n: int) -> None:
    wanted, before = power_at_or_above(n), list(plain.free)
    what = f"allocate({n}) with free runs (start, length) {before}"
    source = plain.source(wanted)
    if source is None:
        refuses(what, OutOfMemory, mine.allocate, n)
        expect(f"the free runs after {what} was refused", mine.free_runs, before)
        expect(f"self._held, the runs in use, after {what} was refused", mine._held, plain.used)
        return
    got, right = mine.allocate(n), plain.take(wanted)
    longest = max(length for _, length in before)
    expect(
        what,
        got,
        right,
        {
            "the right half was kept and the left one set free; keep the left": (
                [source[0] + source[1] - wanted] if source[1] > wanted else []
            ),
            "of several runs of one length not the lowest was taken": (
                [start for start, length in before if length == source[1]]
            ),
            "the longest free run was cut; cut the shortest that fits, so that long ones stay whole": (
                [start for start, length in before if length == longest]
            ),
            "that run is too short for the request": [start for start, length in before if length < wanted],
            "that slot begins no free run": [got],
        },
    )
    try:
        length = mine.held(got)
    except KeyError:
        raise CheckFailed(
            f"{what}: run {got} is not noted in self._held, so it could never be freed."
        ) from None
    expect(
        f"the length of the run that {what} gave",
        length,
        wanted,
        {
            "a run's length is a power of two; the request's own length was noted": [n],
            "the free run was handed out whole; halve it until it just fits": [source[1]],
        },
    )
    expect(
        f"the free runs after {what}",
        mine.free_runs,
        plain.free,
        {
            "the other halves of the run that was cut are lost; each must become free": (
                [run for run in before if run != source],
                *([run for run in plain.free if run != lost] for lost in plain.free),
            ),
            "the run that was handed out still counts as free": (
                sorted({*plain.free, source}),
                sorted([*plain.free, (got, wanted)]),
            ),
        },
    )
    expect(f"self._held, the runs in use, after {what}", mine._held, plain.used)


def check_2_3(answer: type[BuddyAllocator]) -> None:
    """Runs given back in random order, in pools that are no power of two as well."""
    random = Random(23)
    for num_slots in (1, 2, 13, 16, 37, 100):
        mine, plain = answer(num_slots), PlainRuns(num_slots)
        for _ in range(40):
            for _ in range(random.randint(1, 6)):
                n = random.choice((1, 1, 2, 3, 4, 7, 9))
                if plain.source(power_at_or_above(n)):
                    mine.allocate(n)
                    plain.take(power_at_or_above(n))
            in_use = sorted(plain.used)
            for start in random.sample(in_use, random.randint(0, len(in_use))):
                _give_back(mine, plain, start)
            unused = random.choice([i for i in range(num_slots + 2) if i not in plain.used])
            refuses(f"free({unused}), where no run in use begins", KeyError, mine.free, unused)
            expect(f"the free runs after free({unused}) was refused", mine.free_runs, plain.free)
        for start in sorted(plain.used):
            _give_back(mine, plain, start)


def _give_back(mine: BuddyAllocator, plain: PlainRuns, start: int) -> None:
    length, right = plain.used[start], plain.joined(start)
    what = f"free({start}), a run of {length}, with free runs (start, length) {plain.free}"
    mine.free(start)
    expect(
        f"the free runs after {what}",
        mine.free_runs,
        right,
        {
            "nothing was given back": [plain.free],
            "the run was not joined with its buddy, which is free": [plain.joined(start, "never")],
            "the run was joined once; a run that was joined may find its own buddy free": [
                plain.joined(start, "once")
            ],
            "it was joined with a neighbour of its length that is not its buddy, the other half of one run": [
                plain.joined(start, "neighbour")
            ],
            "it was joined with a run of another length; buddies are of one length": [
                plain.joined(start, "any length")
            ],
        },
    )
    plain.free = right
    del plain.used[start]
    try:
        mine.held(start)
    except KeyError:
        return
    raise CheckFailed(f"After {what} the run is still noted in self._held.")
