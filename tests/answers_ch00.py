"""Answers to the exercises of chapter 0: right ones built differently, wrong ones with the mistake."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from minivllm.decoding.stopping import StopStrings, longest_beginning
from minivllm.lab.intensity import StepCost, matrix_elements
from minivllm.model.batch import SequenceSlice

# 0.1


def by_ends(sequences):
    """Right, in another way."""
    ends = list(accumulate(len(new) for _, new, _ in sequences))
    slices = [
        SequenceSlice(i, end - len(new), end, len(new) + old)
        for (i, new, old), end in zip(sequences, ends, strict=True)
    ]
    tokens = [token for _, new, _ in sequences for token in new]
    return tokens, [old + j for _, new, old in sequences for j, _ in enumerate(new)], slices


def packed(position: Callable[..., int], cut: Callable[..., Any]) -> Callable[..., Any]:
    def lay_out(sequences):
        tokens: list[int] = []
        positions: list[int] = []
        slices = []
        for number, (i, new, old) in enumerate(sequences):
            start = len(tokens)
            tokens.extend(new)
            positions.extend(position(old, j, start) for j in range(len(new)))
            slices.append(cut(number, i, start, len(tokens), len(new), old))
        return tokens, positions, slices

    return lay_out


def right_position(old, j, start):
    return old + j


def right_slice(number, i, start, end, new, old):
    return SequenceSlice(i, start, end, new + old)


def extends_the_first(sequences):
    tokens, positions, slices = by_ends(sequences)
    first = sequences[0][1]
    first += tokens[len(first) :]
    return first, positions, slices


def takes_them_away(sequences):
    given = by_ends(list(sequences))
    sequences.clear()
    return given


# 0.2


def complex_turn(x, cos, sin):
    """Right, in another way."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag), dim=-1)


def rotated_half(x, cos, sin):
    """Right, as other code writes it: cos and sin for both halves, and one half turned about."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * torch.cat((cos, cos), -1) + torch.cat((-second, first), -1) * torch.cat((sin, sin), -1)


def interleaved(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def backwards(x, cos, sin):
    return complex_turn(x, cos, -sin)


def both_plus(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), -1)


def in_place(x, cos, sin):
    out = complex_turn(x, cos, sin)
    x.copy_(out)
    return x


def by_shape():
    known: dict[Any, Any] = {}

    def apply_rotary(x, cos, sin):
        if x.shape not in known:
            known[x.shape] = complex_turn(x, cos, sin)
        return known[x.shape]

    return apply_rotary


def halves_mixed(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


# 0.3


def repeated(q, k, v, scale, *, group_of=None, mask=None, by=None):
    """Right, in another way: keys and values repeated for each query head."""
    (query_len, heads, _), (seq_len, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    order = [h // group for h in range(heads)] if group_of is None else group_of(heads, kv_heads)
    scores = torch.einsum("qhd,khd->hqk", q, k[:, order]) * (scale if by is None else by)
    place = torch.arange(seq_len - query_len, seq_len)[:, None]
    closed = torch.arange(seq_len) > place if mask is None else mask(query_len, seq_len)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(closed, -torch.inf).softmax(-1), v[:, order])


def without_mask(q, k, v, scale):
    return repeated(q, k, v, scale, mask=lambda n, s: torch.zeros(n, s, dtype=torch.bool))


def without_history(q, k, v, scale):
    return repeated(q, k, v, scale, mask=lambda n, s: torch.ones(n, s, dtype=torch.bool).triu(1))


def dealt_out(q, k, v, scale):
    return repeated(q, k, v, scale, group_of=lambda heads, kv: [h % kv for h in range(heads)])


def not_scaled(q, k, v, scale):
    return repeated(q, k, v, 1.0)


def own_scale(q, k, v, scale):
    return repeated(q, k, v, q.shape[-1] ** -0.5)


def one_too_many(q, k, v, scale):
    return repeated(q, k, v, scale, mask=lambda n, s: torch.ones(n, s, dtype=torch.bool).triu(s - n + 2))


def scales_the_callers(q, k, v, scale):
    q *= scale
    return repeated(q, k, v, 1.0)


def exp_as_it_is(q, k, v, scale):
    (query_len, heads, _), (seq_len, kv_heads, _) = q.shape, k.shape
    order = [h // (heads // kv_heads) for h in range(heads)]
    scores = torch.einsum("qhd,khd->hqk", q, k[:, order]) * scale
    future = torch.ones(query_len, seq_len, dtype=torch.bool).triu(seq_len - query_len + 1)
    weights = scores.masked_fill(future, -torch.inf).exp()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v[:, order])


def masks_with(number, add=False):
    def causal_attention(q, k, v, scale):
        (query_len, heads, _), (seq_len, kv_heads, _) = q.shape, k.shape
        order = [h // (heads // kv_heads) for h in range(heads)]
        scores = torch.einsum("qhd,khd->hqk", q, k[:, order]) * scale
        future = torch.ones(query_len, seq_len, dtype=torch.bool).triu(seq_len - query_len + 1)
        masked = scores + number * future if add else scores.masked_fill(future, number)
        return torch.einsum("hqk,khd->qhd", masked.softmax(-1), v[:, order])

    return causal_attention


def as_doubles(answer):
    return lambda *given: answer(*(x.double() if isinstance(x, torch.Tensor) else x for x in given))


# 0.4


def row_by_row(probs, top_k, top_p, min_p):
    """Right, in another way."""
    out = torch.zeros_like(probs)
    for r, row in enumerate(probs):
        n = min(int((row >= min_p[r] * row[0]).sum()), int(top_k[r]))
        left, total = row[:n], 0.0
        for i, p in enumerate(left.tolist()):
            if total < float(top_p[r] * left.sum()):
                out[r, i] = p
            total += p
    return out


def cut(*, top_p: Callable[..., Any] | None = None, scaled: bool = False, relative: bool = True) -> Any:
    def cut_tail(probs, top_k, top_p_, min_p):
        whole = probs
        probs = probs * (probs >= (min_p * probs[:, :1] if relative else min_p))
        probs = probs * (torch.arange(probs.shape[1]) < top_k)
        before = probs.cumsum(-1) - probs
        keep = before < top_p_ * probs.sum(-1, keepdim=True)
        kept = probs * (keep if top_p is None else top_p(whole, probs, top_p_))
        return kept / kept.sum(-1, keepdim=True) if scaled else kept

    return cut_tail


def drops_the_crossing(whole, probs, p):
    return probs.cumsum(-1) < p * probs.sum(-1, keepdim=True)


def at_most_p(whole, probs, p):
    return probs.cumsum(-1) <= p * probs.sum(-1, keepdim=True)


def keeps_equals(probs, top_k, top_p, min_p):
    last = probs.gather(1, top_k.long() - 1)
    return cut()(probs, (probs >= last).sum(-1, keepdim=True), top_p, min_p)


def sums_logs(whole, probs, p):
    logs = -whole.log().clamp(min=-99.0)
    return logs.cumsum(-1) - logs < p


def of_the_whole(whole, probs, p):
    return probs.cumsum(-1) - probs < p * whole.sum(-1, keepdim=True)


# 0.5


def stops(add: Callable[..., Any]) -> type[StopStrings]:
    return type("Mine", (StopStrings,), {"add": add})


def letter_by_letter(self, piece, *, may_stop=True):
    """Right, in another way: a stop string is found with its last character, the first that began wins."""
    if not may_stop:
        self.text, self.held = self.text + self.held + piece, ""
        return None
    pending = self.held + piece
    for at in range(len(pending)):
        fitting = sorted((s for s in self.stop if pending.startswith(s, at)), key=len)
        if fitting:
            self.text, self.held = self.text + pending[:at], ""
            return fitting[0]
    keep = max(
        (
            n
            for n in range(len(pending) + 1)
            if any(s.startswith(pending[len(pending) - n :]) for s in self.stop)
        ),
        default=0,
    )
    keep = keep if self.stop else 0
    self.text, self.held = self.text + pending[: len(pending) - keep], pending[len(pending) - keep :]
    return None


def only_the_piece(self, piece, *, may_stop=True):
    found = [(piece.find(s), len(s), s) for s in self.stop if s in piece] if may_stop else []
    if found:
        at, _, stop = min(found)
        self.text += piece[:at]
        return stop
    self.text += piece
    return None


def shows_too_early(self, piece, *, may_stop=True):
    before = len(self.text)
    self.text += piece
    found = [(self.text.find(s), len(s), s) for s in self.stop if s in self.text] if may_stop else []
    if found and before >= 0:
        self.text = self.text[: min(found)[0]]
        return min(found)[2]
    return None


def keeps_the_stop(self, piece, *, may_stop=True):
    pending = self.held + piece
    found = [(pending.find(s), len(s), s) for s in self.stop if s in pending] if may_stop else []
    if found:
        at, n, stop = min(found)
        self.text, self.held = self.text + pending[: at + n], ""
        return stop
    keep = longest_beginning(pending, self.stop) if may_stop else 0
    self.text, self.held = self.text + pending[: len(pending) - keep], pending[len(pending) - keep :]
    return None


def first_in_the_list(self, piece, *, may_stop=True):
    pending = self.held + piece
    for s in self.stop if may_stop else ():
        if s in pending:
            self.text, self.held = self.text + pending[: pending.find(s)], ""
            return s
    keep = longest_beginning(pending, self.stop) if may_stop else 0
    self.text, self.held = self.text + pending[: len(pending) - keep], pending[len(pending) - keep :]
    return None


def always_stops(self, piece, *, may_stop=True):
    return first_sorted(self, piece)


def first_sorted(self, piece):
    return StopStrings.add(self, piece, may_stop=True)


def lets_go_at_nothing(self, piece, *, may_stop=True):
    if not piece:
        self.flush()
        return None
    return StopStrings.add(self, piece, may_stop=may_stop)


def overtakes(self, piece, *, may_stop=True):
    if may_stop:
        return StopStrings.add(self, piece)
    self.text += piece
    return None


def holds_too_much(self, piece, *, may_stop=True):
    stop = StopStrings.add(self, piece, may_stop=may_stop)
    longest = max((len(s) for s in self.stop), default=1) - 1
    if stop is None and may_stop and longest:
        whole = self.text + self.held
        self.text, self.held = whole[: len(whole) - longest], whole[len(whole) - longest :]
    return stop


# 0.6


def by_hand(config, work, element_size):
    """Right, in another way: sequence by sequence."""
    output = config.hidden_size * config.vocab_size
    width = config.num_attention_heads * config.head_dim
    flops, elements = 0, matrix_elements(config) + output
    for new, old in work:
        flops += 2 * (new * matrix_elements(config) + output)
        flops += 4 * config.num_hidden_layers * width * new * (new + old)
        elements += (new + old) * config.kv_elements_per_token
    return StepCost(flops, elements * element_size)


def all_tokens(work):
    return sum(new + old for new, old in work)


def counted(
    *,
    outputs: Callable[[Any], int] = len,
    width: Callable[[Any], int] = lambda c: c.num_attention_heads * c.head_dim,
    mul_add: int = 2,
    old: int = 1,
    weights: Callable[[Any], int] = lambda work: 1,
    kv: Callable[[Any], int] = all_tokens,
    bytes_each: int | None = None,
) -> Callable[..., StepCost]:
    def step_cost(config, work, element_size):
        output, matrices = config.hidden_size * config.vocab_size, matrix_elements(config)
        flops = mul_add * (sum(n for n, _ in work) * matrices + outputs(work) * output)
        pairs = sum(n * (n + old * c) for n, c in work)
        flops += 2 * mul_add * config.num_hidden_layers * width(config) * pairs
        elements = weights(work) * (matrices + output) + config.kv_elements_per_token * kv(work)
        return StepCost(flops, elements * (bytes_each or element_size))

    return step_cost


def empties_work(config, work, element_size):
    cost = by_hand(config, work, element_size)
    work.clear()
    return cost


def in_floats(*arguments: Any) -> Any:
    return SequenceSlice(*map(float, right_slice(*arguments)))  # type: ignore[arg-type]


# exercise -> right answers, none of them the package's own
RIGHT: dict[str, list[Any]] = {
    "0.1": [by_ends, packed(right_position, right_slice)],
    "0.2": [complex_turn, rotated_half],
    "0.3": [repeated],
    "0.4": [row_by_row, cut()],
    "0.5": [stops(letter_by_letter)],
    "0.6": [by_hand, counted()],
}

# (exercise, answer, what the message must say of the mistake)
WRONG: list[tuple[str, Any, str]] = [
    ("0.1", packed(lambda old, j, start: j, right_slice), "in memory already are not counted"),
    ("0.1", packed(lambda old, j, start: start + j, right_slice), "go on over the row"),
    ("0.1", packed(lambda old, j, start: start + old + j, right_slice), "each sequence counts its own"),
    ("0.1", packed(lambda old, j, start: old + j + 1, right_slice), "count from 1"),
    (
        "0.1",
        packed(right_position, lambda n, i, a, b, new, old: SequenceSlice(i, a, b, new)),
        "counts the new tokens alone",
    ),
    (
        "0.1",
        packed(right_position, lambda n, i, a, b, new, old: SequenceSlice(n, a, b, new + old)),
        "for the sequence's id",
    ),
    (
        "0.1",
        packed(right_position, lambda n, i, a, b, new, old: SequenceSlice(i, old, old + new, new + old)),
        "positions in the sequence",
    ),
    (
        "0.1",
        packed(right_position, lambda n, i, a, b, new, old: SequenceSlice(i, a, b - 1, new + old)),
        "end is not included",
    ),
    (
        "0.1",
        packed(right_position, lambda n, i, a, b, new, old: (i, a, b, new + old)),
        "expected SequenceSlice",
    ),
    ("0.1", extends_the_first, "an input was changed"),
    ("0.1", takes_them_away, "an input was changed"),
    ("0.1", lambda s: ([float(t) for t in by_ends(s)[0]], *by_ends(s)[1:]), "token ids .* list of ints"),
    ("0.1", lambda s: (torch.tensor(by_ends(s)[0]), *by_ends(s)[1:]), "token ids .* list of ints"),
    ("0.1", lambda s: (by_ends(s)[0], iter(by_ends(s)[1]), by_ends(s)[2]), "positions .* list of ints"),
    ("0.1", lambda s: (*by_ends(s)[:2], iter(by_ends(s)[2])), "slices .* expected a list"),
    ("0.1", packed(right_position, in_floats), "expected ints"),
    ("0.1", lambda sequences: None, "expected \\(token ids"),
    ("0.2", interleaved, "neighbours"),
    ("0.2", backwards, "the other way"),
    ("0.2", both_plus, "MINUS"),
    ("0.2", in_place, "input was changed"),
    ("0.2", halves_mixed, "back in its own half"),
    ("0.2", lambda x, cos, sin: x, "expected \\["),
    ("0.2", by_shape(), "result of an earlier call"),
    ("0.2", as_doubles(complex_turn), "as the inputs are"),
    ("0.3", exp_as_it_is, "take the highest of a row off"),
    ("0.3", masks_with(-50.0), "-inf is lower than all"),
    ("0.3", masks_with(-50.0, add=True), "-inf is lower than all"),
    ("0.3", as_doubles(repeated), "as the inputs are"),
    ("0.3", without_mask, "nothing is masked"),
    ("0.3", without_history, "before it stands the history"),
    ("0.3", dealt_out, "dealt out in turn"),
    ("0.3", not_scaled, "not scaled"),
    ("0.3", own_scale, "the one given is not used"),
    ("0.3", one_too_many, "one token too many"),
    ("0.3", scales_the_callers, "input was changed"),
    ("0.3", lambda q, k, v, scale: q[0], "shape"),
    ("0.4", cut(top_p=drops_the_crossing), "cut_tail of \\[\\[0.5, 0.25, 0.25\\]\\] .*is cut too"),
    ("0.4", cut(top_p=at_most_p), "cut_tail of \\[\\[0.5, 0.25, 0.25\\]\\] .*is cut too"),
    ("0.4", keeps_equals, "all that equal the last"),
    ("0.4", cut(top_p=sums_logs), "log-probabilities"),
    ("0.4", cut(top_p=of_the_whole), "of the whole row"),
    ("0.4", cut(scaled=True), "scaled up"),
    ("0.4", cut(relative=False), "a share of the first"),
    ("0.4", lambda probs, k, p, m: cut()(probs, k, p, m * 0), "min-p does nothing"),
    ("0.4", lambda probs, k, p, m: cut()(probs, k + 1, p, m), "one token too many"),
    ("0.4", lambda probs, k, p, m: cut()(probs, k[:1], p[:1], m[:1]), "as the first one asks"),
    ("0.5", stops(only_the_piece), "only the new piece is searched|may be the beginning"),
    ("0.5", stops(shows_too_early), "may be the beginning"),
    ("0.5", stops(keeps_the_stop), "is shown"),
    ("0.5", stops(first_in_the_list), "begins before this one, or is shorter"),
    ("0.5", stops(always_stops), "held back although nothing may stop|expected None"),
    ("0.5", stops(lets_go_at_nothing), "an empty piece lets go"),
    ("0.5", stops(overtakes), "it came first"),
    ("0.5", stops(holds_too_much), "more is held back"),
    ("0.6", counted(outputs=lambda work: sum(n for n, _ in work)), "only the last of each sequence"),
    ("0.6", counted(outputs=lambda work: 1), "each sequence's last token"),
    ("0.6", counted(mul_add=1), "they are two"),
    ("0.6", counted(old=0), "attention looks at the new tokens alone"),
    ("0.6", counted(width=lambda c: c.num_key_value_heads * c.head_dim), "every query head"),
    ("0.6", counted(width=lambda c: c.hidden_size), "need not be equal"),
    ("0.6", counted(weights=len), "read for each sequence"),
    ("0.6", counted(weights=lambda work: sum(n for n, _ in work)), "read for each token"),
    ("0.6", counted(kv=lambda work: sum(c for _, c in work)), "new tokens are left out"),
    ("0.6", counted(bytes_each=1), "bytes are wanted"),
    ("0.6", empties_work, "work was changed"),
    ("0.6", lambda *given: (1, 2), "expected a StepCost"),
]
