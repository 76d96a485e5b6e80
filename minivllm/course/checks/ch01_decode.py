"""Above the chapters: the check of exercise 1.5: the decode loop, on a model that shows every mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from minivllm.course.checking import CheckFailed, expect
from minivllm.model.batch import Batch


def check_1_5(greedy: Callable[..., Any]) -> None:
    """On a model that shows every mistake: its next token depends on all tokens and their positions."""
    random = Random(15)
    for keeps_kv in (True, False):
        for prompt_len, num_tokens in ((1, 1), (3, 7), (8, 2), (5, 0), (2, 11)):
            prompt = [random.randint(0, 96) for _ in range(prompt_len)]
            given, seq_id = list(prompt), random.randint(1, 50)
            store = WatchedStore(keeps_kv)
            model = WatchedModel(store, num_tokens, seq_id)
            what = f"greedy of {num_tokens} tokens after {prompt} on a store with keeps_kv={keeps_kv}"
            model.what = what
            try:
                got = greedy(model, store, given, num_tokens, seq_id)
            except ValueError as error:
                raise CheckFailed(
                    f"{what}: {error} In each step the new tokens are those that memory does not have."
                ) from error
            all_tokens = [*prompt, *_continuation(prompt, num_tokens)]
            expect(
                what,
                got,
                all_tokens[prompt_len:],
                {
                    "the prompt was returned too": [all_tokens],
                    "there is one token too many or too few": [
                        [*all_tokens[prompt_len:], *_continuation(all_tokens, 1)],
                        all_tokens[prompt_len:-1],
                    ],
                },
            )
            expect(f"{what}: the prompt afterwards", given, prompt, {"it was changed; copy it": [all_tokens]})
            expect(
                f"{what}: calls of store.free",
                store.freed,
                [seq_id],
                {
                    "the store still has the sequence's tensors": [[]],
                    "another sequence was freed; seq_id is the one to let go": [[0]],
                },
            )
    for failure in (RuntimeError, ValueError):
        _expect_freed_after_failure(greedy, failure)


def _continuation(tokens: Sequence[int], n: int) -> list[int]:
    found = list(tokens)
    for _ in range(n):
        found.append(sum((i + 2) * (t + 3) for i, t in enumerate(found)) % 97)
    return found[len(tokens) :]


def _expect_freed_after_failure(greedy: Callable[..., Any], error: type[BaseException]) -> None:
    store, what = WatchedStore(True), f"a model that fails with {error.__name__}"

    def failing(batch: Batch, store: Any) -> Tensor:
        raise error("the model failed")

    failing.device = torch.device("cpu")  # type: ignore[attr-defined]
    try:
        greedy(failing, store, [1, 2], 3, 8)
    except error:
        mistake = "the memory leaks; let go of it whatever the error is"
        expect(f"{what}: calls of store.free", store.freed, [8], {mistake: [[]]})
        return
    raise CheckFailed(f"{what}: expected its error, got none.")


class WatchedStore:
    """A store that only says whether it keeps, and remembers what was freed."""

    def __init__(self, keeps_kv: bool):
        self.keeps_kv = keeps_kv
        self.tokens: list[int] = []
        self.freed: list[int] = []

    def free(self, seq_id: int) -> None:
        """Remember it."""
        self.freed.append(seq_id)


class WatchedModel:
    """A model whose next token is a sum over all tokens and their positions; it refuses a wrong batch."""

    def __init__(self, store: WatchedStore, num_tokens: int, seq_id: int):
        self.store, self.left, self.seq_id, self.what = store, num_tokens, seq_id, ""
        self.device, self.dtype = torch.device("cpu"), torch.float64

    def __call__(self, batch: Batch, store: Any) -> Tensor:
        if store is not self.store or len(batch.slices) != 1:
            raise CheckFailed(f"{self.what}: give the model a batch of the one sequence, and the store.")
        if batch.slices[0].seq_id != self.seq_id:
            raise CheckFailed(
                f"{self.what}: the batch has sequence {batch.slices[0].seq_id}, and seq_id is {self.seq_id}. "
                "The store would keep it under one id and free another."
            )
        self.left -= 1
        if self.left < 0:
            raise CheckFailed(f"{self.what}: more steps than tokens were asked for.")
        new, positions = batch.token_ids.tolist(), batch.positions.tolist()
        for mistake in self._mistakes(len(new), positions):
            raise CheckFailed(
                f"{self.what}: with {len(self.store.tokens)} tokens in memory, the model was given {new} "
                f"at positions {positions}. It looks as if {mistake}."
            )
        tokens = [*self.store.tokens, *new]
        if self.store.keeps_kv:
            self.store.tokens = tokens
        logits = torch.zeros(1, 97, dtype=torch.float64)
        logits[0, _continuation(tokens, 1)[0]] = 1
        return logits

    def _mistakes(self, num_new: int, positions: list[int]) -> Iterator[str]:
        have = len(self.store.tokens)
        if positions == list(range(have, have + num_new)):
            return
        if have == 0:
            yield "tokens were left out, and this store has none: without keeps_kv each step brings them all"
        elif positions[0] == 0 and num_new > 1:
            yield "the whole sequence was computed again, beside what memory has: give the new tokens only"
        elif positions[0] == 0:
            yield "the positions begin at 0 again; a new token's position is num_computed"
        elif positions[0] < have:
            yield "a token was given twice: after a step, memory has all tokens that the step was given"
        else:
            yield "a token was left out: the one that the last step gave is not in memory yet"
