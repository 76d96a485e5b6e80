"""Answers to the exercises of chapter 1: right ones built differently, wrong ones with the mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minivllm.errors import OutOfMemory
from minivllm.memory.naive import NaiveManager
from minivllm.memory.naive_store import NaiveStore
from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch


def manager(allocate: Callable[..., Any]) -> type[NaiveManager]:
    return type("Mine", (NaiveManager,), {"allocate": allocate})


def store(attend: Callable[..., Any]) -> type[NaiveStore]:
    return type("Mine", (NaiveStore,), {"attend": attend})


def by_the_layer(config, bits):
    """Right, in another way."""
    head = config.head_dim * bits / 8
    one_layer = (head + head) * config.num_key_value_heads
    return int(sum(one_layer for _ in range(config.num_hidden_layers)))


def hidden_over_heads(c, bits):
    head_dim = c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim * bits // 8


def query_heads(c, bits):
    return 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * bits // 8


def keys_only(c, bits):
    return c.num_hidden_layers * c.num_key_value_heads * c.head_dim * bits // 8


def in_bits(c, bits):
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * bits


def bytes_first(c, bits):
    return c.kv_elements_per_token * (bits // 8)


def one_layer(c, bits):
    return 2 * c.num_key_value_heads * c.head_dim * bits // 8


def step_by_step(prompt_len, output_len):
    """Right, in another way."""
    return sum(range(prompt_len, prompt_len + output_len - 1))


def one_join_too_many(p, n):
    return n * p + n * (n - 1) // 2


def new_rows_too(p, n):
    return sum(p + i + 1 for i in range(n - 1))


def prompt_row_by_row(p, n):
    return sum(range(p + n - 1))


def refuse_by_the_free_slots(self, seq_id, n):
    """Right, in another way."""
    more = max(0, n - self._tokens.get(seq_id, 0))
    if more > self.num_slots - sum(self._tokens.values()):
        raise OutOfMemory("too many tokens")
    self._tokens[seq_id] = self._tokens.get(seq_id, 0) + more
    self._held += more


def shrinks(self, seq_id, n):
    if not self.can_allocate(seq_id, n):
        raise OutOfMemory("too many tokens")
    self._held += n - self._tokens.get(seq_id, 0)
    self._tokens[seq_id] = n


def adds(self, seq_id, n):
    if not self.can_allocate(seq_id, n):
        raise OutOfMemory("too many tokens")
    before = self._tokens.get(seq_id, 0)
    self._tokens[seq_id] = before + n
    self._held += n


def takes_then_refuses(self, seq_id, n):
    fits = self.can_allocate(seq_id, n)
    before = self._tokens.get(seq_id, 0)
    self._tokens[seq_id] = max(n, before)
    self._held += self._tokens[seq_id] - before
    if not fits:
        raise OutOfMemory("too many tokens")


def never_refuses(self, seq_id, n):
    before = self._tokens.get(seq_id, 0)
    self._tokens[seq_id] = max(n, before)
    self._held += self._tokens[seq_id] - before


def forgets_the_sum(self, seq_id, n):
    if not self.can_allocate(seq_id, n):
        raise OutOfMemory("too many tokens")
    self._tokens[seq_id] = max(n, self._tokens.get(seq_id, 0))


def counts_only_itself(self, seq_id, n):
    if n > self.num_slots - self._held:
        raise OutOfMemory("too many tokens")
    never_refuses(self, seq_id, n)


def attention(q, keys, values):
    return causal_attention(q, keys, values, q.shape[-1] ** -0.5)


class RowByRow(NaiveStore):
    """Right, in another way: a list of rows for each sequence and layer, stacked at each use."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Any, list[Any]] = {}

    def attend(self, layer: int, q: Any, k: Any, v: Any, batch: Batch) -> Any:
        outs = []
        for s in batch.slices:
            rows = [*self.rows.get((s.seq_id, layer), [])]
            rows += [(k[i].clone(), v[i].clone()) for i in range(s.start, s.end)]
            if len(rows) != s.seq_len:
                raise ValueError("two sequences under one id")
            self.rows[s.seq_id, layer] = rows
            keys, values = (torch.stack(t) for t in zip(*rows, strict=True))
            outs.append(attention(q[s.start : s.end], keys, values))
        return torch.cat(outs)

    def free(self, seq_id: int) -> None:
        self.rows = {key: rows for key, rows in self.rows.items() if key[0] != seq_id}


def joining(
    place: Callable[..., Any] = lambda row, seq_id, layer: (seq_id, layer),
    join: Callable[..., Any] = lambda old, new: torch.cat((old, new)),
    first: Callable[..., Any] = torch.clone,
    keep: bool = True,
    look: bool = False,
    look_late: bool = False,
) -> type[NaiveStore]:
    """The right answer, but for one part."""

    def attend(self, layer, q, k, v, batch):
        out = torch.empty_like(q)
        for row, (seq_id, start, end, seq_len) in enumerate(batch):
            key, keys, values = place(row, seq_id, layer), k[start:end], v[start:end]
            if key in self._kv:
                keys, values = (
                    join(old, new) for old, new in zip(self._kv[key], (keys, values), strict=True)
                )
            else:
                keys, values = first(keys), first(values)
            if look and len(keys) != seq_len:
                raise ValueError("the lengths differ")
            if keep or key not in self._kv:
                self._kv[key] = keys, values
            if look_late and len(keys) != seq_len:
                raise ValueError("the lengths differ")
            out[start:end] = attention(q[start:end], keys, values)
        return out

    return store(attend)


def changes_q(self, layer, q, k, v, batch):
    q *= q.shape[-1] ** -0.5
    return torch.empty_like(q)


def as_double(self, layer, q, k, v, batch):
    return NaiveStore.attend(self, layer, q, k, v, batch).double()


def not_a_number(self, layer, q, k, v, batch):
    return NaiveStore.attend(self, layer, q, k, v, batch) * torch.nan


def with_two_numbers(model, store, prompt, num_tokens, seq_id=0):
    """Right, in another way: the new tokens, and where they begin."""
    output: list[int] = []
    new, begin = list(prompt), 0
    try:
        for _ in range(num_tokens):
            logits = model(Batch.pack([(seq_id, new, begin)]), store)
            output.append(int(logits[-1].argmax()))
            if store.keeps_kv:
                new, begin = output[-1:], begin + len(new)
            else:
                new = [*prompt, *output]
    finally:
        store.free(seq_id)
    return output


def decoding(
    computed: Callable[..., int] = len,
    position: Callable[[int], int] = lambda num_computed: num_computed,
    keep: bool | None = None,
    free: bool = True,
    also_prompt: bool = False,
    more: int = 0,
    steps: int = 0,
    caught: Any = (),
    own_id: bool = True,
) -> Callable[..., Any]:
    """The right loop, but for one part."""

    def greedy(model, store, prompt, num_tokens, seq_id=0):
        tokens, num_computed = list(prompt), 0
        while len(tokens) < len(prompt) + num_tokens + more + steps:
            new = tokens[num_computed:]
            batch = Batch.pack([(seq_id if own_id else 0, new, position(num_computed))])
            try:
                logits = model(batch, store)
            except caught:
                store.free(seq_id)
                raise
            keeps = store.keeps_kv if keep is None else keep
            num_computed = computed(tokens) if keeps else 0
            tokens.append(int(logits.argmax()))
        if free:
            store.free(seq_id)
        tokens = tokens[: len(tokens) - steps]
        return tokens if also_prompt else tokens[len(prompt) :]

    return greedy


def frees_the_first(model, store, prompt, num_tokens, seq_id=0):
    free, store.free = store.free, lambda seq_id: free(0)
    return with_two_numbers(model, store, prompt, num_tokens, seq_id)


def changes_the_prompt(model, store, prompt, num_tokens, seq_id=0):
    output = with_two_numbers(model, store, prompt, num_tokens, seq_id)
    prompt += output
    return output


# exercise -> right answers, none of them the package's own
RIGHT: dict[str, list[Any]] = {
    "1.1": [by_the_layer, lambda config, bits: config.kv_elements_per_token * bits // 8],
    "1.2": [step_by_step],
    "1.3": [manager(refuse_by_the_free_slots)],
    "1.4": [RowByRow, joining(look=True)],
    "1.5": [with_two_numbers],
}

# (exercise, answer, what the message must say of the mistake)
WRONG: list[tuple[str, Any, str]] = [
    ("1.1", hidden_over_heads, "hidden_size / num_attention_heads"),
    ("1.1", query_heads, "only the KV heads"),
    ("1.1", keys_only, "factor 2"),
    ("1.1", in_bits, "these are bits"),
    ("1.1", one_layer, "layers are missing"),
    ("1.1", bytes_first, "multiply first"),
    ("1.2", one_join_too_many, "one join too many"),
    ("1.2", new_rows_too, "new rows were counted"),
    ("1.2", prompt_row_by_row, "first step was counted"),
    ("1.2", lambda p, n: p * (n - 1), "copy of the prompt alone"),
    ("1.2", lambda p, n: (n - 1) * (n - 2) // 2, "prompt's rows were left out"),
    ("1.2", lambda p, n: n - 1, "counted as one row"),
    ("1.3", manager(shrinks), "shrank"),
    ("1.3", manager(adds), "n was added"),
    ("1.3", manager(takes_then_refuses), "all or nothing"),
    ("1.3", manager(never_refuses), "must be refused"),
    ("1.3", manager(forgets_the_sum), "no longer their sum"),
    ("1.3", manager(counts_only_itself), "it fits, and was refused"),
    ("1.4", joining(place=lambda row, seq_id, layer: (row, layer)), "row of the batch was used"),
    ("1.4", joining(place=lambda row, seq_id, layer: (seq_id, 0)), "layers share one memory"),
    ("1.4", joining(join=lambda old, new: new.clone()), "older keys and values were not used"),
    ("1.4", joining(join=lambda old, new: torch.cat((new, old))), "stand before the old"),
    ("1.4", joining(join=lambda old, new: old), "do not see themselves"),
    ("1.4", joining(keep=False), "not kept for the next step"),
    ("1.4", joining(first=lambda rows: rows), "a view of k and v"),
    ("1.4", joining(), "under one id"),
    ("1.4", joining(look_late=True), "the refused rows were kept"),
    ("1.4", store(as_double), "in float32: expected a tensor of q's dtype .*64\\.$"),
    ("1.4", store(not_a_number), "rows .* are wrong\\. They must be"),
    ("1.4", joining(place=lambda row, seq_id, layer: (seq_id, 0), look=True), "was refused"),
    ("1.4", store(changes_q), "q was changed"),
    ("1.4", store(lambda self, layer, q, k, v, batch: None), "q's shape"),
    ("1.5", decoding(keep=False), "whole sequence was computed again"),
    ("1.5", decoding(position=lambda num_computed: 0), "positions begin at 0 again"),
    ("1.5", decoding(computed=lambda tokens: len(tokens) - 1), "given twice"),
    ("1.5", decoding(position=lambda num_computed: num_computed + (num_computed > 0)), "left out"),
    ("1.5", decoding(keep=True), "this store has none"),
    ("1.5", decoding(free=False), "still has the sequence's tensors"),
    ("1.5", decoding(also_prompt=True), "the prompt was returned too"),
    ("1.5", decoding(more=1), "more steps than tokens|one token too many"),
    ("1.5", decoding(), "expected its error|memory leaks"),
    ("1.5", decoding(caught=RuntimeError), "fails with ValueError.*memory leaks"),
    ("1.5", decoding(steps=1), "more steps than tokens"),
    ("1.5", decoding(own_id=False), "under one id and free another"),
    ("1.5", frees_the_first, "another sequence was freed"),
    ("1.5", changes_the_prompt, "it was changed; copy it"),
]
