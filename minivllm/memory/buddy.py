"""Chapter 2: a buddy allocator, which hands out runs of neighbouring slots.

A run's length is a power of two and its start a multiple of that. Too long a free run is split in two
halves, buddies, until it fits; a run given back joins its buddy when that is free too, and so on up: at
most log2(num_slots) steps either way (Knowlton, 1965). What it costs: a request of 1,025 slots gets 2,048.

    allocate(3) of 16 free slots     [ 3 + 1 | 4 free |    8 free     ]     4 is the power of two above 3
    allocate(5)                      [ 3 + 1 | 4 free |    5 + 3      ]
    allocate(5) again                OutOfMemory: 4 slots are free, 8 in one run are needed

Invariants: runs never overlap, no two free buddies stay apart, and free plus held slots are all slots.
"""

from __future__ import annotations

from minivllm.errors import OutOfMemory


class BuddyAllocator:
    """Runs of slots 0 to num_slots - 1. num_slots need not be a power of two: 13 is runs of 8, 4 and 1."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free: dict[int, set[int]] = {}  # length of a free run -> starts
        self._held: dict[int, int] = {}  # start of a run in use -> its length
        start = 0
        while start < num_slots:
            length = 1 << ((num_slots - start).bit_length() - 1)
            self._free.setdefault(length, set()).add(start)
            start += length

    @staticmethod
    def run_length(n: int) -> int:
        """Slots that a request of n takes: the power of two at or above it."""
        return 1 << (max(n, 1) - 1).bit_length()

    @property
    def largest_free_run(self) -> int:
        """Length of the longest run that could be handed out now; 0 when nothing is free."""
        return max((length for length, starts in self._free.items() if starts), default=0)

    @property
    def num_free(self) -> int:
        """Free slots in runs of any length."""
        return sum(length * len(starts) for length, starts in self._free.items())

    @property
    def free_runs(self) -> list[tuple[int, int]]:
        """(start, length) of every free run, in order of start."""
        return sorted((start, length) for length, starts in self._free.items() for start in starts)

    def held(self, start: int) -> int:
        """Length of the run in use that begins at start."""
        return self._held[start]

    def allocate(self, n: int) -> int:
        """Take a run of run_length(n) slots; returns its start. Raises OutOfMemory, and changes nothing.

        It comes from the shortest free run that is long enough, of several the one with the lowest start.
        That one is halved until it fits: the left half is kept, each right half is free.
        """
        wanted = self.run_length(n)
        fitting = [length for length, starts in self._free.items() if starts and length >= wanted]
        if not fitting:
            raise OutOfMemory(
                f"{n} slots need a free run of {wanted}; {self.num_free} slots are free, "
                f"the longest run of them is {self.largest_free_run}. Free something first."
            )
        length = min(fitting)
        start = min(self._free[length])
        self._free[length].remove(start)
        while length > wanted:
            length //= 2
            self._free.setdefault(length, set()).add(start + length)
        self._held[start] = length
        return start

    def free(self, start: int) -> None:
        """Give back the run that begins at start. Raises KeyError for one that is not in use.

        While its buddy, the other half of the run that both were cut from, is free, the two become one again.
        """
        length = self._held.pop(start)
        while (buddy := start ^ length) in self._free.get(length, ()):
            self._free[length].remove(buddy)
            start, length = min(start, buddy), 2 * length
        self._free.setdefault(length, set()).add(start)

    def check_integrity(self) -> None:
        """Raise AssertionError where runs overlap, slots are lost, or two free buddies stay apart."""
        runs, at = self.free_runs, 0
        for start, length in sorted([*runs, *self._held.items()]):
            assert start == at, "a slot is lost or given twice"
            assert start % length == 0, "a run does not begin at a multiple of its length"
            at += length
        assert at == self.num_slots, "slots are lost at the end"
        assert not any((start ^ length, length) in runs for start, length in runs), (
            "two free buddies stay apart"
        )
