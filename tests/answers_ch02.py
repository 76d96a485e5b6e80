"""Answers to the exercises of chapter 2: right ones built differently, wrong ones with the mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from minivllm.errors import OutOfMemory
from minivllm.lab.waste import Split
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.contiguous_store import ContiguousStore


def lengths(run_length: Callable[[int], Any]) -> type[BuddyAllocator]:
    return type("Mine", (BuddyAllocator,), {"run_length": staticmethod(run_length)})


def buddy(**methods: Callable[..., Any]) -> type[BuddyAllocator]:
    return type("Mine", (BuddyAllocator,), methods)


def store(move: Callable[..., Any]) -> type[ContiguousStore]:
    return type("Mine", (ContiguousStore,), {"move": move})


def doubling(n):
    """Right, in another way."""
    length = 1
    while length < n:
        length += length
    return length


def split_recursively(self, n):
    """Right, in another way."""
    wanted = self.run_length(n)

    def take(length):
        if length > self.num_slots:
            raise OutOfMemory("no run")
        if self._free.get(length):
            start = min(self._free[length])
            self._free[length].discard(start)
        else:
            start = take(2 * length)
            self._free.setdefault(length, set()).add(start + length)
        return start

    start = take(wanted)
    self._held[start] = wanted
    return start


def cut(self, n, which=min, left=True, lose=False, note=None, lowest=min):
    """What `allocate` does, with a mistake to choose."""
    wanted = self.run_length(n)
    fitting = [length for length, starts in self._free.items() if starts and length >= wanted]
    if not fitting:
        raise OutOfMemory("no run")
    length = which(fitting)
    start = lowest(self._free[length])
    self._free[length].remove(start)
    while length > wanted:
        length //= 2
        if left:
            self._free.setdefault(length, set()).add(start + length)
        else:
            self._free.setdefault(length, set()).add(start)
            start += length
        if lose:
            self._free[length].discard(start + length)
    self._held[start] = length if note is None else note
    return start


def whole(self, n):
    fitting = [length for length, starts in self._free.items() if starts and length >= self.run_length(n)]
    if not fitting:
        raise OutOfMemory("no run")
    start = min(self._free[min(fitting)])
    self._free[min(fitting)].remove(start)
    self._held[start] = min(fitting)
    return start


def exact(self, n):
    """Not aligned: bump the start by n, as if lengths were free to choose."""
    start = cut(self, n)
    self._held[start] = n
    return start


def none_left(self, n):
    try:
        return cut(self, n)
    except OutOfMemory:
        return None


def not_noted(self, n):
    start = cut(self, n)
    del self._held[start]
    return start


def still_free(self, n):
    start = cut(self, n)
    self._free[self._held[start]].add(start)
    return start


def by_recursion(self, start):
    """Right, in another way."""
    length = self._held.pop(start)

    def give(start, length):
        other = start - length if start // length % 2 else start + length
        if other in self._free.get(length, set()):
            self._free[length].discard(other)
            give(min(start, other), length + length)
        else:
            self._free.setdefault(length, set()).add(start)

    give(start, length)


def never_joined(self, start):
    self._free.setdefault(self._held[start], set()).add(start)
    del self._held[start]


def joined_once(self, start):
    length = self._held.pop(start)
    if start ^ length in self._free.get(length, ()):
        self._free[length].remove(start ^ length)
        start, length = min(start, start ^ length), 2 * length
    self._free.setdefault(length, set()).add(start)


def joined_with_a_neighbour(self, start):
    length = self._held.pop(start)
    while True:
        near = [s for s in (start - length, start + length) if s in self._free.get(length, ())]
        if not near:
            break
        self._free[length].remove(near[0])
        start, length = min(start, near[0]), 2 * length
    self._free.setdefault(length, set()).add(start)


def joined_with_any_length(self, start):
    length = self._held.pop(start)
    while found := [size for size, starts in self._free.items() if start ^ length in starts]:
        self._free[found[0]].remove(start ^ length)
        start, length = min(start, start ^ length), 2 * length
    self._free.setdefault(length, set()).add(start)


def still_held(self, start):
    length = self._held[start]
    by_recursion(self, start)
    self._held[start] = length


def forgiving(self, start):
    if start in self._held:
        by_recursion(self, start)


def by_sums(snapshot, final):
    """Right, in another way."""
    later = [max(0, min(final[s.seq_id], s.held) - s.used) for s in snapshot.sequences]
    return Split(snapshot.used, sum(later), snapshot.held - snapshot.used - sum(later))


def nothing_wasted(snapshot, final):
    return Split(snapshot.used, snapshot.held - snapshot.used, 0)


def counted_twice(snapshot, final):
    reserved = sum(min(final[s.seq_id], s.held) for s in snapshot.sequences)
    return Split(snapshot.used, reserved, snapshot.held - snapshot.used - reserved)


def beyond_the_run(snapshot, final):
    reserved = sum(final[s.seq_id] - s.used for s in snapshot.sequences)
    return Split(snapshot.used, reserved, snapshot.held - snapshot.used - reserved)


def all_together(snapshot, final):
    ends = sum(final[s.seq_id] for s in snapshot.sequences)
    reserved = min(ends, snapshot.held) - snapshot.used
    return Split(snapshot.used, reserved, snapshot.held - snapshot.used - reserved)


def free_is_waste(snapshot, final):
    right = by_sums(snapshot, final)
    return Split(right.used, right.reserved, right.waste + snapshot.free)


def from_a_copy(self, moves):
    """Right, in another way: slower, since all of the pool is copied."""
    before, count = self.kv.clone(), 0
    for m in moves:
        for i in range(m.length):
            self.kv[:, :, m.destination + i] = before[:, :, m.source + i]
            count += self.kv[:, :, 0].nbytes
    return count


def one_by_one(self, moves):
    pieces = []
    for m in moves:
        pieces.append(self.kv[:, :, m.source : m.source + m.length].clone())
        self.kv[:, :, m.destination : m.destination + m.length] = pieces[-1]
    return sum(p.nbytes for p in pieces)


def views(self, moves):
    pieces = [self.kv[:, :, m.source : m.source + m.length] for m in moves]
    for m, piece in zip(moves, pieces, strict=True):
        self.kv[:, :, m.destination : m.destination + m.length] = piece.clone()
    return sum(piece.nbytes for piece in pieces)


def keys_alone(self, moves):
    before = self.kv.clone()
    for m in moves:
        self.kv[:, 0, m.destination : m.destination + m.length] = before[:, 0, m.source : m.source + m.length]
    return sum(m.length for m in moves) * before[:, :, 0].nbytes


def the_other_way(self, moves):
    before = self.kv.clone()
    for m in moves:
        self.kv[:, :, m.source : m.source + m.length] = before[:, :, m.destination : m.destination + m.length]
    return sum(m.length for m in moves) * before[:, :, 0].nbytes


def only_planned(self, moves):
    return sum(m.length for m in moves) * self.kv[:, :, 0].nbytes


def a_second_pool(self, moves):
    before = self.kv
    self.kv = before.clone()
    for m in moves:
        self.kv[:, :, m.destination : m.destination + m.length] = before[:, :, m.source : m.source + m.length]
    return sum(m.length for m in moves) * before[:, :, 0].nbytes


def tokens(self, moves):
    from_a_copy(self, moves)
    return sum(m.length for m in moves)


def twice(self, moves):
    return 2 * from_a_copy(self, moves)


def without_a_word(self, n):
    return doubling(n)


def noted_before_refusal(self, n):
    self._held[self.num_slots] = self.run_length(n)
    start = cut(self, n)
    del self._held[self.num_slots]
    return start


def every_half_noted(self, n):
    before = set(self.free_runs)
    start = cut(self, n)
    self._held.update(run for run in self.free_runs if run not in before)
    return start


def eats_final(snapshot, final):
    right = by_sums(snapshot, final)
    final.clear()
    return right


def eight_bytes_a_number(self, moves):
    from_a_copy(self, moves)
    return sum(m.length for m in moves) * self.kv[:, :, 0].numel() * 8


def through_float32(self, moves):
    pieces = [self.kv[:, :, m.source : m.source + m.length].float() for m in moves]
    for m, piece in zip(moves, pieces, strict=True):
        self.kv[:, :, m.destination : m.destination + m.length] = piece
    return sum(m.length for m in moves) * self.kv[:, :, 0].nbytes


def layer_0_alone(self, moves):
    before = self.kv.clone()
    for m in moves:
        self.kv[0, :, m.destination : m.destination + m.length] = before[0, :, m.source : m.source + m.length]
    return sum(m.length for m in moves) * before[:, :, 0].nbytes


# exercise -> right answers, none of them the package's own
RIGHT: dict[str, list[Any]] = {
    "2.1": [lengths(doubling)],
    "2.2": [buddy(allocate=split_recursively)],
    "2.3": [buddy(free=by_recursion)],
    "2.4": [by_sums],
    "2.5": [store(from_a_copy)],
}

# (exercise, answer, what the message must say of the mistake)
WRONG: list[tuple[str, Any, str]] = [
    ("2.1", lengths(lambda n: 1 << n.bit_length()), "was doubled"),
    ("2.1", lengths(lambda n: 1 << max(n.bit_length() - 1, 0)), "power of two below"),
    ("2.1", lengths(lambda n: n), "shortest run is one slot"),
    ("2.1", lengths(lambda n: max(n, 1)), "own length"),
    ("2.1", lengths(lambda n: 0 if n == 0 else doubling(n)), "shortest run is one slot"),
    ("2.1", lengths(lambda n: 2 ** math.ceil(math.log2(max(n, 1)))), "floating point"),
    ("2.1", buddy(run_length=without_a_word), "write @staticmethod"),
    ("2.1", buddy(run_length=doubling), "write @staticmethod"),
    ("2.2", buddy(allocate=lambda self, n: cut(self, n, which=max)), "long ones stay whole"),
    ("2.2", buddy(allocate=lambda self, n: cut(self, n, left=False)), "keep the left"),
    ("2.2", buddy(allocate=lambda self, n: cut(self, n, lose=True)), "other halves.*are lost"),
    ("2.2", buddy(allocate=lambda self, n: cut(self, n, lowest=max)), "not the lowest"),
    ("2.2", buddy(allocate=whole), "handed out whole"),
    ("2.2", buddy(allocate=exact), "power of two; the request's own length"),
    ("2.2", buddy(allocate=none_left), "OutOfMemory"),
    ("2.2", buddy(allocate=not_noted), "not noted"),
    ("2.2", buddy(allocate=still_free), "still counts as free"),
    ("2.2", buddy(allocate=noted_before_refusal), "_held, the runs in use, after .*refused"),
    ("2.2", buddy(allocate=every_half_noted), "_held, the runs in use, after"),
    ("2.3", buddy(free=never_joined), "not joined with its buddy"),
    ("2.3", buddy(free=joined_once), "joined once"),
    ("2.3", buddy(free=joined_with_a_neighbour), "not its buddy"),
    ("2.3", buddy(free=joined_with_any_length), "another length"),
    ("2.3", buddy(free=still_held), "still noted"),
    ("2.3", buddy(free=forgiving), "KeyError"),
    ("2.3", buddy(free=lambda self, start: self._held.pop(start)), "nothing was given back"),
    ("2.4", nothing_wasted, "all that is unused was called reserved"),
    ("2.4", counted_twice, "still to come"),
    ("2.4", beyond_the_run, "does not hold"),
    ("2.4", all_together, "expected"),
    ("2.4", free_is_waste, "nobody holds them"),
    ("2.4", eats_final, "read, not changed"),
    ("2.5", store(one_by_one), "overwritten before it was read"),
    ("2.5", store(views), "overwritten before it was read"),
    ("2.5", store(keys_alone), "only the keys"),
    ("2.5", store(the_other_way), "changed places"),
    ("2.5", store(only_planned), "nothing was moved"),
    ("2.5", store(a_second_pool), "same tensor"),
    ("2.5", store(tokens), "not bytes"),
    ("2.5", store(twice), "counted twice"),
    ("2.5", store(eight_bytes_a_number), "bytes of another dtype"),
    ("2.5", store(through_float32), "rounded on the way"),
    ("2.5", store(layer_0_alone), "in layer 1, keys.*only layer 0 was moved"),
]  # fmt: skip
