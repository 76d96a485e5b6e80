"""Chapter 6: the memory of a whole request: all its sequences get room, lose it and come back together.

Between scheduler and books. A scheduler decides who runs; what that means for a group of sequences, for
prefixes that are in memory already and for blocks that were swapped out is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence as Parts
from dataclasses import dataclass

from minivllm.errors import OutOfMemory
from minivllm.memory.manager import KVManager
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.swap import SwapSpace
from minivllm.outputs import SharingReport
from minivllm.scheduling.request import Request
from minivllm.scheduling.sequence import Sequence


@dataclass
class PreemptionCounters:
    """What preemption has cost so far: how often, tokens computed again, blocks copied out and back."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


class RequestMemory:
    """Takes and gives back memory for requests. swap_space: where victims of preemption go; None: nowhere.

    Predicates change nothing; `admit` and `release` do all or nothing.
    """

    def __init__(self, manager: KVManager, swap_space: SwapSpace | None = None):
        self.manager, self.swap_space = manager, swap_space
        self.sharing = manager if isinstance(manager, SharingManager) else None
        self.prefixes = manager if isinstance(manager, PrefixCachingManager) else None
        self.counters = PreemptionCounters()

    def expect(self, request: Request) -> None:
        """Say what a request that waits may need."""
        for sequence in request.holders:
            self.manager.expect(sequence.seq_id, len(request.prompt_token_ids), request.max_tokens - 1)

    def fits_ever(self, request: Request) -> bool:
        """Whether a request fits alone, all its branches counted."""
        if self.sharing is None:
            return self.manager.fits_ever(request.longest)
        return self.sharing.fits_ever(request.longest, request.width, len(request.prompt_token_ids))

    def admit(self, request: Request, spare: int) -> bool:
        """Take memory for a waiting request, if its tokens fit with `spare` slots left free; else False. What
        is in memory already counts as computed."""
        if self._is_swapped(request):
            return self._swap_in(request, spare)
        first, n = request.first, request.target(request.first)
        room = n + spare + self._slots_to_fork(request)
        if self.prefixes is not None:
            hits = self._hits(request, first, n)
            if not self.prefixes.can_begin(first.seq_id, room, hits):
                return False
            self.prefixes.begin(first.seq_id, n, hits)
            first.num_computed_tokens = len(hits) * self.prefixes.block_size
            if not request.has_begun:  # after a preemption or a failed step it finds its own blocks
                self.prefixes.stats.record(n, len(hits), self.prefixes.block_size)
                request.num_cached_tokens = first.num_computed_tokens
                request.has_begun = True
        elif self.manager.can_allocate(first.seq_id, room):
            self.manager.allocate(first.seq_id, n)
        else:
            return False
        self.promise(request)
        return True

    def grow(self, request: Request, parts: Parts[tuple[Sequence, int]]) -> bool:
        """Let sequences of a request have so many more tokens; False where memory is full. What was taken
        before it was full stays taken, so call again, or release."""
        group = self.sharing if request.width > 1 else None
        before = None if group is None else (group.num_copies, group.pool.num_free_blocks)
        for sequence, num_new in parts:
            n = sequence.num_computed_tokens + num_new
            try:
                self.manager.allocate(sequence.seq_id, n)
            except OutOfMemory:
                return False
        if group is not None and before is not None:
            copies, free = before
            if group.pool.num_free_blocks < free or request.sharing is None:  # or there is nothing new to say
                self._report(request, group.num_copies - copies)
        return True

    def computed(self, request: Request) -> None:
        """The step has been computed: blocks that are full now can be found by others."""
        if self.prefixes is None:
            return
        for sequence in request.holders:
            full = sequence.num_computed_tokens // self.prefixes.block_size
            if full > self.prefixes.num_registered(sequence.seq_id):
                tokens = sequence.token_ids[: sequence.num_computed_tokens]
                self.prefixes.register(sequence.seq_id, tokens, request.cache_salt)

    def fork(self, request: Request, parent: Sequence, child: Sequence) -> None:
        """Let a sequence begin with all that another has."""
        assert self.sharing is not None
        self.sharing.fork(parent.seq_id, child.seq_id)
        child.num_computed_tokens = parent.num_computed_tokens

    def parted(self, request: Request, first: Sequence) -> None:
        """Each sequence of a group has a block table of its own; what was promised for this is free again."""
        request.forked = True
        if self.sharing is not None:
            self.sharing.promise(first.seq_id, 0)

    def promise(self, request: Request) -> None:
        """Keep the blocks that the sequences of a group will need when they part, and no more."""
        if self.sharing is not None:
            num_blocks = self._slots_to_fork(request) // self.sharing.block_size
            self.sharing.promise(request.first.seq_id, num_blocks)

    def free(self, sequence: Sequence) -> None:
        """Give back all that a sequence has, wherever it is."""
        self.manager.free(sequence.seq_id)
        if self.swap_space is not None:
            self.swap_space.drop([sequence.seq_id])

    def release(self, request: Request) -> None:
        """A request gives up its memory and begins again from its first token."""
        for sequence in request.live:
            self.free(sequence)
        request.begin_again()
        self.expect(request)

    def preempt(self, request: Request) -> None:
        """A request gives way: its blocks are swapped out where there is room, else computed again later."""
        self.counters.num_preemptions += 1
        request.num_preemptions += 1
        if self.swap_space is not None and self.sharing is not None:
            lengths = {s.seq_id: s.num_computed_tokens for s in request.holders}
            if any(lengths.values()) and self.swap_space.can_swap_out(self.sharing, lengths):
                self.swap_space.swap_out(self.sharing, lengths)
                return
        self.release(request)

    def _is_swapped(self, request: Request) -> bool:
        return self.swap_space is not None and self.swap_space.has(request.first.seq_id)

    def _swap_in(self, request: Request, spare: int) -> bool:
        assert self.swap_space is not None
        assert self.sharing is not None
        block_size, ids, hits = self.sharing.block_size, self._ids(request), self._all_hits(request)
        more = num_blocks_for(spare + self._slots_to_fork(request), block_size) + self._growth(request)
        if not self.swap_space.can_swap_in(self.sharing, ids, hits, more):
            return False
        self.swap_space.swap_in(self.sharing, ids, hits)
        self.promise(request)
        return True

    def _growth(self, request: Request) -> int:
        """Blocks that a request which was swapped out needs beside them to compute what it lacks."""
        assert self.swap_space is not None
        assert self.sharing is not None
        size, needed, last_blocks = self.sharing.block_size, 0, set()
        for s in request.holders:
            needed += num_blocks_for(request.target(s), size) - num_blocks_for(s.num_computed_tokens, size)
            if s.num_computed_tokens % size:  # of those that share a last block in part, all but one copy it
                last = self.swap_space.block_table(s.seq_id)[-1]
                needed += last in last_blocks
                last_blocks.add(last)
        return needed

    def _ids(self, request: Request) -> list[int]:
        return [sequence.seq_id for sequence in request.holders]

    def _all_hits(self, request: Request) -> dict[int, list[int]]:
        if self.prefixes is None:
            return {}
        return {s.seq_id: self._hits(request, s, s.num_computed_tokens + 1) for s in request.holders}

    def _hits(self, request: Request, sequence: Sequence, n: int) -> list[int]:
        """Blocks in memory with the first of a sequence's n tokens; at least one token is left to compute."""
        assert self.prefixes is not None
        return self.prefixes.match(sequence.seq_id, sequence.token_ids[:n], request.cache_salt)

    def _slots_to_fork(self, request: Request) -> int:
        """Slots of the blocks that the sequences of a group need when they part."""
        n = request.target(request.first)
        if self.sharing is None or request.forked or n >= request.longest:
            return 0
        return self.sharing.num_blocks_to_fork(n, request.num_seqs) * self.sharing.block_size

    def _report(self, request: Request, num_copies: int) -> None:
        assert self.sharing is not None
        now, apart = self.sharing.num_blocks(sequence.seq_id for sequence in request.live)
        if not request.forked:  # apart, each sequence would hold the same
            apart *= request.num_seqs
        request.sharing = (request.sharing or SharingReport()).after(now, apart, num_copies)
