"""Chapter 0: from a row of logits to one token.

Temperature flattens or sharpens the distribution; min-p, top-k and top-p cut off its tail; one random
number picks from what is left. On a row sorted from most to least likely all three cuts keep a head of
the row, so the row is sorted once and the shortest head wins:

    token          the   a     my    one   ...
    probability    0.55  0.25  0.12  0.05  ...
    top_k=3        keep  keep  keep  -          rank below k
    top_p=0.75     keep  keep  -     -          what stands before it sums to less than top_p
    min_p=0.2      keep  keep  keep  -          at least 0.2 x 0.55
    u = 0.71       the first token at which the running sum of 0.55, 0.25 passes 0.71 x 0.80: "a"

The order of the cuts is vLLM's: temperature, min-p, top-k, top-p over what top-k left.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from minivllm.decoding.draw import Settings, draw_from_head, row_sums, weights_of
from minivllm.errors import InvalidLogits
from minivllm.outputs import Logprob
from minivllm.params import SamplingParams

BLOCK = 512  # logits; fewer cost more maxima, more a longer search
HEADS = 256, 4096  # tokens that are sorted at first, and for rows that are not decided by then
MAX_DRAWN = 2**19  # logits of rows that are drawn from at a time, unless one row has more
MAX_SORTED = MAX_DRAWN // 4  # of those that are sorted whole


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[Random]) -> list[int]:
    """One token id for each row of logits [num_seqs, vocab_size].

    Row i follows params[i] and draws one number from generators[i], unless it is greedy. Rows do not
    touch each other: a sequence's own generator gives it the same tokens whatever runs beside it. Raises
    InvalidLogits for a row that holds NaN or has no finite maximum.
    """
    if not len(logits) == len(params) == len(generators):
        raise ValueError(
            f"{len(logits)} rows, {len(params)} params and {len(generators)} generators do not match."
        )
    largest, best = likeliest(logits)
    tokens: list[int] = best.tolist()
    if not largest.isfinite().all():  # NaN wins every max; all of a row at -inf leaves no token either
        row = int(largest.isfinite().logical_not().nonzero()[0])
        raise InvalidLogits(
            f"Row {row} of the logits has {largest[row].item()} for its maximum, so no token can be chosen. "
            "The weights are damaged, or the dtype is too narrow for this model: try dtype='float32'.",
            row,
        )
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if drawn:
        rows = logits if len(drawn) == len(logits) else logits[drawn]
        own = Settings.of([params[i] for i in drawn], [generators[i].random() for i in drawn], rows)
        for i, token in zip(drawn, draw(rows, own).tolist(), strict=True):
            tokens[i] = token
    return tokens


def draw(logits: Tensor, settings: Settings) -> Tensor:
    """A token id for each row of logits [num_seqs, vocab_size]; `draw_sorted`'s, mostly without its sort.

    On a CPU, where a sort is slow: so many rows at a time that float64 copies of them are small, and stay in
    a cache.
    """
    num_seqs, vocab_size = logits.shape
    if logits.device.type != "cpu":
        return draw_sorted(logits, settings)
    tokens, left = torch.empty(num_seqs, dtype=torch.int64), torch.arange(num_seqs)
    for size in (n for n in HEADS if n < vocab_size):
        undecided = [left[:0]]
        for rows in _parts(left, MAX_DRAWN // vocab_size):
            tokens[rows], certain = draw_from_head(logits[rows], settings.rows(rows), size)
            undecided.append(rows[~certain])
        left = torch.cat(undecided)
    for rows in _parts(left, MAX_SORTED // vocab_size):
        tokens[rows] = draw_sorted(logits[rows], settings.rows(rows))
    return tokens


def _parts(rows: Tensor, most: int) -> Sequence[Tensor]:
    """So many at a time, but one at least; none of no rows."""
    return rows.split(max(1, most)) if len(rows) else ()


def draw_sorted(logits: Tensor, settings: Settings) -> Tensor:
    """A token id for each row, by sorting all of it."""
    probs, order = sorted_distribution(logits, settings)
    total = probs.cumsum(dim=-1)
    rank = torch.searchsorted(total, settings.uniform * total[:, -1:], right=True)
    last_kept = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(1, rank.minimum(last_kept))[:, 0]


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row of logits [num_seqs, vocab_size] and its token id; the lowest id among equals.

    As `logits.max(dim=-1)`, which goes through a row number by number, to have the place too. The largest of
    each block alone is found with many numbers at once, and then only the winner's block is searched. What is
    left after the last whole block stands for itself.
    """
    num_seqs, vocab_size = logits.shape
    whole = vocab_size - vocab_size % BLOCK
    if whole == 0:
        return logits.amax(dim=-1), logits.argmax(dim=-1)
    blocks = logits[:, :whole].unflatten(1, (-1, BLOCK))
    largest, block = blocks.amax(dim=-1).max(dim=-1)
    rows = torch.arange(num_seqs, device=logits.device)
    token_ids = block * BLOCK + blocks[rows, block].argmax(dim=-1)
    if whole == vocab_size:
        return largest, token_ids
    rest = logits[:, whole:].amax(dim=-1)
    later = ~(largest >= rest) & ~largest.isnan()  # NaN counts as the largest, as it does in `max`
    found = torch.where(later, whole + logits[:, whole:].argmax(dim=-1), token_ids)
    return torch.where(later, rest, largest), found


def sampling_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """What each row draws from: probabilities from high to low with cut tokens at 0, and their token ids.

    Both [num_seqs, vocab_size]; float64, because a running sum over 150,000 float32 numbers drifts.
    Probabilities of kept tokens are not scaled up to sum to 1.
    """
    return sorted_distribution(logits, Settings.of(params, [0.0] * len(params), logits))


def sorted_distribution(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """`sampling_distribution` by settings."""
    weights = weights_of(logits, settings.temperature)
    weights /= row_sums(weights)
    probs, order = weights.sort(dim=-1, descending=True, stable=True)
    return cut_tail(probs, settings.top_k, settings.top_p, settings.min_p), order


def cut_tail(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to 0 the probabilities that min-p, then top-k, then top-p cut off; the others stay as they are.

    probs [num_seqs, vocab_size], each row from high to low; top_k, top_p, min_p [num_seqs, 1]. min-p keeps
    what is at least min_p times the row's first; top-k the first top_k. top-p looks at what is left by
    then: it keeps a token when those before it sum to less than top_p of that rest, so the first always.
    """
    probs = probs * (probs >= min_p * probs[:, :1])
    rank = torch.arange(probs.shape[-1], device=probs.device)
    probs = probs * (rank < top_k)
    total = probs.cumsum(dim=-1)
    return probs * (total - probs < top_p * total[:, -1:])


def top_logprobs(logits: Tensor, token: int, k: int) -> dict[int, Logprob]:
    """Of one row of logits [vocab_size]: the chosen token's log-probability and those of the k likeliest.

    The chosen one stands first; among equals the lower id has the better rank.
    """
    logprobs = logits.double().log_softmax(dim=-1)
    best: list[int] = []
    if k:  # sorted are only those that may be among them, by ascending id
        worst = logprobs.topk(min(k, len(logprobs))).values[-1]
        ids = (logprobs >= worst).nonzero()[:, 0]
        best = ids[logprobs[ids].sort(descending=True, stable=True).indices[:k]].tolist()
    found = {token: _rank(logprobs, token)} | {i: rank for rank, i in enumerate(best, start=1)}
    return {i: Logprob(logprobs[i].item(), rank) for i, rank in found.items()}


def _rank(logprobs: Tensor, token: int) -> int:
    """1 for the likeliest token; a token stands behind those of the same probability with a lower id."""
    likelier = logprobs > logprobs[token]
    likelier[:token] |= logprobs[:token] == logprobs[token]
    return int(likelier.sum()) + 1
