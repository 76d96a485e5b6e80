"""Above the chapters: the check of exercise 1.4: attention on a memory that grows, against plain stores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.course.checking import CheckFailed
from minivllm.memory.naive_store import NaiveStore
from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch

# How keys and values are joined wrongly: name -> what the message says of it.
MISTAKES = {
    "row": "the row of the batch was used where the sequence's id is meant: a neighbour left, and the one "
    "that moved up got its keys",
    "layer": "the layers share one memory; each has keys and values of its own",
    "new only": "the older keys and values were not used: the new tokens see only each other",
    "reversed": "the new keys stand before the old ones; the order is that of the tokens",
    "old only": "the new tokens do not see themselves: attend over the new keys too",
    "unkept": "the joined keys and values were used but not kept for the next step",
    "view": "a view of k and v was kept; the batch's memory was used again, and the keys with it: copy them",
}
# (sequence id, new tokens) of each sequence in a batch, step by step
STEPS: list[list[tuple[int, int]]] = [
    [(7, 3), (4, 3)],  # of one length, so that only the id tells them apart
    [(4, 1), (7, 1)],  # in another order
    [(4, 2)],  # 7 has left
    [(9, 5), (4, 1)],
    [(9, 1)],
    [(7, 4), (9, 2)],  # the id comes again, as another sequence
    [(7, 1), (9, 1)],
]


def check_1_4(answer: type[NaiveStore]) -> None:
    """Sequences that come, change places and go, in two layers, against plain stores, right and wrong."""
    store, right = answer(), PlainStore("right")
    wrong = {name: PlainStore(name) for name in MISTAKES}
    generator = torch.Generator().manual_seed(14)
    lengths: dict[int, int] = {}
    for number, step in enumerate(STEPS):
        if number == 2:
            del lengths[7]
            store.free(7)
            for plain in (right, *wrong.values()):
                plain.free(7)
        batch = Batch.pack([(i, [0] * n, lengths.get(i, 0)) for i, n in step])
        lengths |= {i: lengths.get(i, 0) + n for i, n in step}
        for layer in (0, 1):
            q, k, v = (
                torch.randn(batch.num_tokens, heads, 6, generator=generator, dtype=torch.float64)
                for heads in (4, 2, 2)
            )
            what = f"step {number + 1}, layer {layer}, a batch of {step} (sequence, new tokens)"
            got = _attended(what, store, layer, (q, k, v), batch)
            expected = right.attend(layer, q, k, v, batch)
            assert expected is not None
            guesses = {name: w.attend(layer, q, k, v, batch) for name, w in wrong.items()}
            older = [s.seq_len > s.end - s.start for s in batch for _ in range(s.start, s.end)]
            _expect_tensor(what, got, expected, guesses, older)
            for each in (k, v):
                each.fill_(float("nan"))  # the engine uses the batch's memory again
    _expect_refusal(answer)


def _attended(
    what: str, store: NaiveStore, layer: int, qkv: tuple[Tensor, Tensor, Tensor], batch: Batch
) -> Any:
    given = q, k, v = tuple(t.clone() for t in qkv)
    try:
        got = store.attend(layer, q, k, v, batch)
    except ValueError as error:
        raise CheckFailed(
            f"{what}: it is in order, and was refused: {error} Is the memory kept by sequence id and layer?"
        ) from error
    for name, mine, theirs in zip("qkv", given, qkv, strict=True):
        if not torch.equal(mine, theirs):
            raise CheckFailed(f"{what}: {name} was changed; the model still needs it.")
    for t in given:
        t.fill_(float("nan"))  # what a store kept of it as a view goes bad
    return got


def _expect_tensor(
    what: str, got: Any, expected: Tensor, guesses: dict[str, Tensor | None], older: list[bool]
) -> None:
    """older: whether a row's sequence has keys of earlier steps; only such a row sees what was kept."""
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        shape = tuple(got.shape) if isinstance(got, Tensor) else got
        raise CheckFailed(f"{what}: expected a tensor of q's shape {tuple(expected.shape)}, got {shape!r}.")
    if got.dtype != expected.dtype:
        raise CheckFailed(f"{what}: expected a tensor of q's dtype {expected.dtype}, got {got.dtype}.")
    if _near(got, expected):
        return
    rows = [i for i in range(len(got)) if not _near(got[i], expected[i])]
    message = f"{what}: rows {rows} of the result are wrong."
    bad = [i for i in rows if bool(got[i].isnan().any())]
    if bad and all(older[i] for i in bad):
        raise CheckFailed(f"{message} Some are NaN: it looks as if {MISTAKES['view']}.")
    for name, guess in guesses.items():
        if guess is not None and _near(got, guess):
            raise CheckFailed(f"{message} It looks as if {MISTAKES[name]}.")
    raise CheckFailed(f"{message} They must be causal_attention over all keys and values of the sequence.")


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-9 if a.dtype == torch.float64 else 1e-5, rtol=0)


def _numbers(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2, for n tokens in float32."""
    q, k, v = (torch.randn(n, heads, 6, generator=generator) for heads in (4, 2, 2))
    return q, k, v


def _expect_refusal(answer: type[NaiveStore]) -> None:
    """Two sequences under one id would give fluent, wrong text; refused, they leave the store as it was."""
    generator = torch.Generator().manual_seed(41)
    for have, start in ((3, 0), (3, 5), (0, 5)):  # tokens in memory, and what the batch says of them
        store, right = answer(), PlainStore("right")
        numbers = {n: _numbers(n, generator) for n in {have, 3, 1}}
        says = f"Sequence 5 has {have} tokens in memory and brings 3; the batch says {3 + start} in all."
        if have:
            before = Batch.pack([(5, [0] * have, 0)])
            first = right.attend(0, *numbers[have], before)
            assert first is not None
            what = f"a batch of {[(5, have)]} (sequence, new tokens) in float32"
            _expect_tensor(what, store.attend(0, *numbers[have], before), first, {}, [False] * have)
        try:
            q, k, v = numbers[3]
            store.attend(0, q + 1, k + 1, v + 1, Batch.pack([(5, [0] * 3, start)]))
        except ValueError:
            pass
        else:
            raise CheckFailed(
                f"{says} Expected ValueError: two sequences under one id would give fluent, wrong text."
            )
        after = Batch.pack([(5, [0], have)])
        expected = right.attend(0, *numbers[1], after)
        assert expected is not None
        what = f"{says} It was refused; then it brings the one token that comes next"
        kept = "It looks as if the refused rows were kept: what is refused must change nothing."
        try:
            got = store.attend(0, *numbers[1], after)
        except ValueError as error:
            raise CheckFailed(f"{what}, and was refused again: {error} {kept}") from error
        try:
            _expect_tensor(what, got, expected, {}, [have > 0])
        except CheckFailed as error:
            raise CheckFailed(f"{error} {kept}") from error


class PlainStore:
    """Keeps lists of rows and joins them anew for each use; or makes one mistake, by its name."""

    def __init__(self, mistake: str):
        self.mistake = mistake
        self.rows: dict[Any, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor | None:
        """As `NaiveStore.attend`; None where the mistake leaves nothing to attend to."""
        out = torch.empty_like(q)
        for row, (seq_id, start, end, _) in enumerate(batch):
            place = {"row": (row, layer), "layer": seq_id}.get(self.mistake, (seq_id, layer))
            old = self.rows.get(place, [])
            new = [(k[i].clone(), v[i].clone()) for i in range(start, end)]
            joined = old + new
            used = {"new only": new, "reversed": new + old, "old only": old or new}.get(self.mistake, joined)
            self.rows[place] = {"reversed": used, "unkept": old or new}.get(self.mistake, joined)
            if len(used) < end - start:
                return None
            keys, values = (torch.stack(t) for t in zip(*used, strict=True))
            out[start:end] = causal_attention(q[start:end], keys, values, 6**-0.5)
        return out

    def free(self, seq_id: int) -> None:
        """Forget a sequence; where the mistake has lost its id, nothing."""
        self.rows = {
            place: rows
            for place, rows in self.rows.items()
            if self.mistake == "row" or seq_id not in (place if isinstance(place, tuple) else (place,))[:1]
        }
