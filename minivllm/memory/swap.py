"""Chapter 6: swapping: a request that must make room keeps its blocks in a second pool, on the CPU.

A preempted request may begin again and compute its keys and values a second time, or they may be copied to
CPU memory and back. A request goes as a whole. A block that its sequences share is copied once, and they
share it again when they are back:

    before     parent [7, 2]  child [7, 5]        device blocks 7, 2 and 5 are free for others now
    on the CPU parent [0, 1]  child [0, 2]        3 blocks, not 4
    after      parent [4, 9]  child [4, 6]        any free device blocks, or prefix hits, which need no copy

The books only list the transfers. The tensor half makes them before the step: all swap-outs, then all
swap-ins, then the copies on write. In this order no block is overwritten before it has been read: a device
block that a swap-out reads may be given to anyone in the same plan. A CPU block that a swap-in reads may
not, since swap-outs come first: it stays taken until the list is fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from minivllm.errors import OutOfBlocks
from minivllm.memory.ref_counts import RefCountedBlockPool
from minivllm.memory.sharing import SharingManager


class SwapSpace:
    """The books of the CPU pool, whose blocks are as large as the device's.

    Invariant: a block's count is the number of sequences that have it, those on their way back included.
    """

    def __init__(self, num_blocks: int):
        self.pool = RefCountedBlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}  # CPU blocks of the sequences that are swapped out
        self._returning: dict[int, list[int]] = {}  # and of those whose swap-in is listed
        self._num_tokens: dict[int, int] = {}  # of both
        self._outs: dict[int, int] = {}  # transfers to make: CPU block written -> device block read
        self._ins: dict[int, int] = {}  # device block written -> CPU block read

    @property
    def num_blocks(self) -> int:
        """Blocks of the CPU pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the CPU pool that can be taken now."""
        return self.pool.num_free_blocks

    def block_table(self, seq_id: int) -> list[int]:
        """The CPU blocks of a sequence that is swapped out, in the order of its tokens (a copy)."""
        return list(self._tables[seq_id])

    def has(self, seq_id: int) -> bool:
        """Whether a sequence is swapped out."""
        return seq_id in self._tables

    def can_swap_out(self, manager: SharingManager, lengths: Mapping[int, int]) -> bool:
        """Whether the sequences of one request can be swapped out now; see swap_out."""
        if self._returning.keys() & lengths.keys():
            return True  # their contents are on the CPU still
        return len(self._sources(manager, lengths)) <= self.num_free_blocks

    def swap_out(self, manager: SharingManager, lengths: Mapping[int, int]) -> int:
        """Move a request to the CPU: sequence id -> its computed tokens. Returns the blocks to copy.

        What the manager has allocated beyond these tokens is undone, and the device blocks are freed, the
        last first. Where the request's swap-in is only listed, that is cancelled and nothing need be copied.
        Raises OutOfBlocks and changes nothing where the CPU pool has too little room.
        """
        assert not self._tables.keys() & lengths.keys(), "a sequence is swapped out already"
        if self._returning.keys() & lengths.keys():
            assert lengths.items() <= self._num_tokens.items(), "a request is swapped as a whole, as it came"
            self._cancel_swap_in(manager, lengths)
            return 0
        sources = self._sources(manager, lengths)
        assert self._ins.keys().isdisjoint(sources), "another request has a block that is not filled yet"
        if len(sources) > self.num_free_blocks:
            raise OutOfBlocks(
                f"{len(sources)} blocks are to be swapped out; {self.num_free_blocks} of {self.num_blocks} "
                "on the CPU are free. Let the request compute its tokens again, or make swap_space larger."
            )
        new = self.pool.allocate(len(sources))
        cpu_block = dict(zip(sources, new, strict=True))
        self._outs.update(zip(new, sources, strict=True))
        for seq_id, n in lengths.items():
            self._tables[seq_id] = [cpu_block[block] for block in manager.filled_blocks(seq_id, n)]
            self._num_tokens[seq_id] = n
            self.pool.share(self._tables[seq_id])
        self.pool.free(new)  # the tables hold them
        for seq_id in lengths:
            manager.free(seq_id)
        return len(new)

    def num_blocks_to_swap_in(
        self, manager: SharingManager, seq_ids: Iterable[int], hits: Mapping[int, Sequence[int]] | None = None
    ) -> int:
        """Blocks that leave the device's free ones: one for each CPU block, hits only where they are free."""
        seq_ids = list(seq_ids)
        found = self._found(manager, seq_ids, hits)
        free = {block for block in found.values() if manager.pool.is_free(block)}
        return len(self._blocks(seq_ids)) - len(found) + len(free)

    def can_swap_in(
        self,
        manager: SharingManager,
        seq_ids: Iterable[int],
        hits: Mapping[int, Sequence[int]] | None = None,
        spare: int = 0,
    ) -> bool:
        """Whether the sequences of one request can come back and leave `spare` device blocks free."""
        return self.num_blocks_to_swap_in(manager, seq_ids, hits) <= manager.num_free_blocks - spare

    def swap_in(
        self, manager: SharingManager, seq_ids: Iterable[int], hits: Mapping[int, Sequence[int]] | None = None
    ) -> int:
        """Bring a request back. Returns the blocks to copy. Raises OutOfBlocks and changes nothing.

        hits: sequence id -> device blocks that hold its first tokens, from a prefix cache. They replace the
        CPU blocks of the same tokens, as far as these are full; the others are copied.
        """
        seq_ids = list(seq_ids)
        needed = self.num_blocks_to_swap_in(manager, seq_ids, hits)
        if needed > manager.num_free_blocks:
            raise OutOfBlocks(
                f"{needed} blocks are needed to swap in and {manager.num_free_blocks} of "
                f"{manager.pool.num_blocks} are free. Free a sequence first."
            )
        device_block = self._found(manager, seq_ids, hits)
        held = [block for block in dict.fromkeys(device_block.values()) if manager.pool.is_free(block)]
        for block in held:
            manager.pool.take(block)  # before new ones are allocated, which could be these
        misses = [block for block in self._blocks(seq_ids) if block not in device_block]
        assert self._outs.keys().isdisjoint(misses), "a request is swapped out and in again in one plan"
        new = manager.pool.allocate(len(misses))
        device_block.update(zip(misses, new, strict=True))
        self._ins.update(zip(new, misses, strict=True))
        for seq_id in seq_ids:
            table = self._returning[seq_id] = self._tables.pop(seq_id)
            manager.adopt(seq_id, [device_block[block] for block in table], self._num_tokens[seq_id])
        manager.pool.free(held + new)  # the tables hold them
        return len(misses)

    def take_transfers(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The transfers to make, for the last time: swap-outs (device block, CPU block), to be made first,
        and swap-ins (CPU block, device block)."""
        outs = [(source, block) for block, source in self._outs.items()]
        ins = [(source, block) for block, source in self._ins.items()]
        self._outs.clear()
        self._ins.clear()
        self.drop(list(self._returning))
        return outs, ins

    def drop(self, seq_ids: int | Iterable[int]) -> None:
        """Forget sequences, and their transfers that are only listed; unknown ids do nothing."""
        for seq_id in [seq_ids] if isinstance(seq_ids, int) else seq_ids:
            table = self._tables.pop(seq_id, None) or self._returning.pop(seq_id, [])
            self._num_tokens.pop(seq_id, None)
            self.pool.free(table[::-1])
        self._outs = {block: source for block, source in self._outs.items() if not self.pool.is_free(block)}
        self._ins = {block: source for block, source in self._ins.items() if not self.pool.is_free(source)}

    def check_integrity(self) -> None:
        """Raise AssertionError where tables, transfers and pool disagree."""
        out = [block for table in self._tables.values() for block in table]
        returning = [block for table in self._returning.values() for block in table]
        self.pool.check_integrity(out + returning)
        assert self._tables.keys().isdisjoint(self._returning), "a sequence is swapped out and coming back"
        assert self._num_tokens.keys() == self._tables.keys() | self._returning.keys()
        assert self._outs.keys() <= set(out), "a block is written for nobody"
        assert set(self._ins.values()) <= set(returning), "a block is read that nobody has"

    def _sources(self, manager: SharingManager, lengths: Mapping[int, int]) -> list[int]:
        """The device blocks with computed tokens of a request, each once."""
        tables = [manager.filled_blocks(seq_id, n) for seq_id, n in lengths.items()]
        return list(dict.fromkeys(block for table in tables for block in table))

    def _blocks(self, seq_ids: Iterable[int]) -> list[int]:
        """The CPU blocks of a request, each once."""
        return list(dict.fromkeys(block for seq_id in seq_ids for block in self._tables[seq_id]))

    def _found(
        self, manager: SharingManager, seq_ids: Iterable[int], hits: Mapping[int, Sequence[int]] | None
    ) -> dict[int, int]:
        """CPU block -> device block with the same contents, for those that a prefix hit replaces."""
        found: dict[int, int] = {}
        for seq_id in seq_ids:
            full = self._tables[seq_id][: self._num_tokens[seq_id] // manager.block_size]
            for block, hit in zip(full, (hits or {}).get(seq_id, ()), strict=False):
                found.setdefault(block, hit)
        return found

    def _cancel_swap_in(self, manager: SharingManager, seq_ids: Collection[int]) -> None:
        """The request's CPU blocks were not given back yet: it has them again."""
        for seq_id in seq_ids:
            self._tables[seq_id] = self._returning.pop(seq_id)
            manager.free(seq_id)
        kept = set(self._blocks(seq_ids))
        self._ins = {block: source for block, source in self._ins.items() if source not in kept}
