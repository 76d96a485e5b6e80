"""Above the chapters: the checks of exercises 2.4 and 2.5: held slots, and moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from minivllm.course.checking import CheckFailed, expect
from minivllm.lab.waste import Split
from minivllm.memory.contiguous import Move
from minivllm.memory.contiguous_store import ContiguousStore
from minivllm.memory.manager import SequenceMemory, Snapshot


def check_2_4(split_held: Callable[[Snapshot, Mapping[int, int]], Any]) -> None:
    """Sequences of all ages, some that hold more than they will use, some that will grow beyond it."""
    random = Random(24)
    for number in range(60):
        sequences, final = [], {}
        for seq_id in random.sample(range(50), random.choice((0, 1, 2, 5))):
            used = random.randint(1, 30)
            held = used + random.choice((0, 1, random.randint(2, 40)))
            final[seq_id] = used + random.choice((0, 3, random.randint(0, 60)))
            sequences.append(SequenceMemory(seq_id, held, used))
        final[99] = random.randint(1, 9)  # a sequence that has not begun, or has ended
        snapshot = Snapshot(400 + number, 8, tuple(sequences))
        each = [Split(s.used, min(final[s.seq_id], s.held) - s.used, 0) for s in sequences]
        used, reserved = sum(p.used for p in each), sum(p.reserved for p in each)
        ends = [final[s.seq_id] for s in sequences]
        shown = [(s.seq_id, s.held, s.used) for s in sequences]
        handed = dict(final)
        expect(
            f"split_held of sequences (id, held, used) {shown}, with final={final}",
            split_held(snapshot, handed),
            Split(used, reserved, snapshot.held - used - reserved),
            {
                "all that is unused was called reserved; some of it no token will ever fill": [
                    Split(used, snapshot.held - used, 0)
                ],
                "the tokens that are there already were counted as still to come": [
                    Split(used, used + reserved, snapshot.held - 2 * used - reserved),
                    Split(used, sum(ends), snapshot.held - used - sum(ends)),
                ],
                "a sequence was expected to fill slots that it does not hold": [
                    Split(used, sum(ends) - used, snapshot.held - sum(ends))
                ],
                "free slots were counted as waste; nobody holds them": [
                    Split(used, reserved, snapshot.num_slots - used - reserved)
                ],
            },
        )
        expect("final after the call: it is to be read, not changed", handed, final)


def check_2_5(answer: type[ContiguousStore]) -> None:
    """Runs that change places, overlap and form rings, in a pool where every number is another.

    Numbers of 8 bytes would be rounded by one who goes through 4; numbers of 4 bytes must count as 4.
    """
    import torch

    from minivllm.model.presets import PRESETS

    random = Random(25)
    for num_slots in (1, 7, 23, 40):
        for dtype in (torch.float64,) * 6 + (torch.float32,) * 6:
            store = answer(PRESETS["tiny-llama"], num_slots, dtype)
            layers, two, _, heads, dim = store.kv.shape
            numbers = torch.arange(store.kv.numel(), dtype=torch.float64) + 1 / 3
            store.kv.copy_(numbers.view(num_slots, layers, two, heads, dim).permute(1, 2, 0, 3, 4))
            _check_moves(store, _moves(random, num_slots))


def _moves(random: Random, num_slots: int) -> list[Move]:
    """Runs that lie one way now and are to lie another way, in any order."""
    lengths, left = [], num_slots
    while left:
        lengths.append(random.randint(1, min(left, 9)))
        left -= lengths[-1]
    kept = random.sample(range(len(lengths)), random.randint(0, len(lengths)))
    places = []
    for _ in range(2):  # before, after
        at, starts = 0, {}
        for i in random.sample(range(len(lengths)), len(lengths)):
            starts[i] = at
            at += lengths[i]
        places.append(starts)
    pairs = [(places[0][i], places[1][i], lengths[i]) for i in kept]
    return [Move(*pair) for pair in pairs if pair[0] != pair[1]]


def _check_moves(store: ContiguousStore, moves: Sequence[Move]) -> None:
    import torch

    kv, before = store.kv, store.kv.clone()

    def carried_out(order: Sequence[Move], to: Any, reads: Any) -> Any:
        for m in order:
            to[:, :, m.destination : m.destination + m.length] = reads[
                :, :, m.source : m.source + m.length
            ].clone()
        return to

    right = carried_out(moves, before.clone(), before)
    got_bytes = store.move(tuple(moves))
    per_slot = before[:, :, 0].nbytes
    what = f"move({[(m.source, m.destination, m.length) for m in moves]}) (source, destination, length)"
    if store.kv is not kv or store.kv.shape != before.shape:
        raise CheckFailed(
            f"{what}: self.kv must stay the same tensor; a second pool would need as much again."
        )
    if not torch.equal(kv, right):
        in_turn, backwards = before.clone(), before.clone()
        keys_only, swapped = before.clone(), [Move(m.destination, m.source, m.length) for m in moves]
        keys_only[:, 0] = right[:, 0]
        layer_0 = torch.cat((right[:1], before[1:]))
        rounded = carried_out(moves, before.clone(), before.float().to(before.dtype))
        mistakes = {
            "a source was overwritten before it was read: one move's destination is another's source": (
                carried_out(moves, in_turn, in_turn),
                carried_out(moves[::-1], backwards, backwards),
            ),
            "nothing was moved": (before,),
            "only the keys were moved, or only the values": (
                keys_only,
                torch.where(keys_only == right, before, right),
            ),
            "only layer 0 was moved": (layer_0,),
            "the numbers were rounded on the way; copy them in the pool's own dtype": (rounded,),
            "source and destination have changed places": (carried_out(swapped, before.clone(), before),),
        }
        named = [name for name, would in mistakes.items() if any(torch.equal(kv, w) for w in would)]
        place = (kv != right).nonzero()[0].tolist()
        layer, half, slot, head, dim = place
        part = (layer, half, slice(None), head, dim)
        raise CheckFailed(
            f"{what}: in layer {layer}, {('keys', 'values')[half]}, the contents of slots "
            f"{_whose(right, part)} were expected to follow each other, got {_whose(kv, part)}. "
            f"First at slot {slot}: expected {right[tuple(place)].item()!r}, got {kv[tuple(place)].item()!r}."
            + (f" It looks as if {named[0]}." if named else "")
        )
    tokens = sum(m.length for m in moves)
    expect(
        f"what {what} returned, with {per_slot} bytes a slot",
        got_bytes,
        tokens * per_slot,
        {
            "tokens were counted, not bytes": [tokens],
            "numbers were counted, not bytes": [tokens * per_slot // before.itemsize],
            "a number was counted with the bytes of another dtype; the pool knows its own": [
                tokens * per_slot // before.itemsize * size for size in (2, 4, 8) if size != before.itemsize
            ],
            "each byte was counted twice, read and written; count what was copied": [2 * tokens * per_slot],
            "only one layer, or only the keys, was counted": [
                tokens * per_slot // before.shape[0],
                tokens * per_slot // 2,
            ],
        },
    )


def _whose(kv: Any, part: tuple[Any, ...]) -> list[int]:
    """For each slot, the slot that its number in this part of the pool was in to begin with."""
    per_slot = kv[:, :, 0].numel()
    return [int(number) // per_slot for number in kv[part].tolist()]
