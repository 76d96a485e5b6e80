"""Chapter 0: the same token as from a sorted row, without sorting what is seldom drawn.

A row has as many logits as the vocabulary has tokens, and sorting it takes longer than a small model takes to
compute it. But the draw looks at the row's head alone, as far as the token that it finds. So only the `size`
likeliest are sorted, and it is checked that no more is needed:

    sorted head                             the others, not sorted
    0.55 0.25 0.12 0.05 | 0.01 0.01         0.01 each, 0.00 ...
        trusted         |  as likely as others that were left out: not trusted, since equals go by id

The others matter to the cuts. Where min-p or top-k cuts all of them off, the head knows everything. Where
both are off, all that it must know of them is their sum, which is the rest. Where a cut falls among them, the
row is undecided. Top-p may end among them, too; then what it keeps is known up to one token's probability,
and the row is decided if u finds the same token for the least and for the most that it can be.

A row that could not be decided is drawn again from a longer head, in the end from all of it, by
`sampler.draw_sorted`, which is also what this must agree with. So is one where u or top-p comes nearer to a
sum than SLACK: there the rounding of that sum decides, and it depends on what else was added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.params import SamplingParams

SUMMED = 512  # numbers that become one sum at first
SLACK = 1e-9  # further from it than any sum of probabilities can be by rounding
LEAST_TOP_P = 1e-300  # of a sum of probabilities it is still more than nothing, so that the likeliest stays


class Settings(NamedTuple):
    """What each row is drawn by, [num_seqs, 1] float64 each; top_k is the vocabulary's size where it is off.
    uniform: at least 0 and less than 1."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], uniform: Sequence[float], logits: Tensor) -> Settings:
        """For these rows of logits [num_seqs, vocab_size]: one tensor, of which these are columns."""
        off = logits.shape[1]
        rows = [
            (p.temperature, p.top_k if p.top_k > 0 else off, max(p.top_p, LEAST_TOP_P), p.min_p, u)
            for p, u in zip(params, uniform, strict=True)
        ]
        return cls(*torch.tensor(rows, dtype=torch.float64, device=logits.device).split(1, dim=1))

    def rows(self, which: slice | Tensor) -> Settings:
        """Of some of the rows."""
        return Settings(*(column[which] for column in self))


def row_sums(rows: Tensor) -> Tensor:
    """The sum of each row [num_rows, size], [num_rows, 1]: to the last bit the same alone and beside others.

    PyTorch shares one long sum among its threads, and of several each is one thread's. So blocks come first.
    """
    whole = rows.shape[1] - rows.shape[1] % SUMMED
    blocks = rows[:, :whole].unflatten(1, (-1, SUMMED)).sum(dim=-1) if whole else rows[:, :0]
    return blocks.sum(dim=-1, keepdim=True) + rows[:, whole:].sum(dim=-1, keepdim=True)


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit - largest) / temperature), float64: probabilities that are not yet divided by their sum."""
    scaled = logits.double()
    if scaled is logits:
        scaled = scaled.clone()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    return scaled.div_(temperature).exp_()


def draw_from_head(logits: Tensor, settings: Settings, size: int) -> tuple[Tensor, Tensor]:
    """(a token id for each row of logits [num_seqs, vocab_size], whether it is certain), by the `size`
    likeliest tokens of each row, fewer than vocab_size. An uncertain row's token means nothing."""
    weights = weights_of(logits, settings.temperature)
    ids = logits.topk(size, sorted=False).indices.sort(dim=-1).values  # equals: the lowest id first
    probs, order = weights.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    total = row_sums(weights)
    probs /= total
    first, last = probs[:, :1].clone(), probs[:, -1:].clone()
    trusted = probs > last
    num_trusted = trusted.sum(dim=-1, keepdim=True)
    none = (settings.top_k <= num_trusted) | (last < settings.min_p * first)  # of the others are kept
    every = (settings.top_k >= logits.shape[1]) & (settings.min_p == 0)
    probs *= trusted
    others = torch.where(none, 0.0, 1 - probs.sum(dim=-1, keepdim=True))
    rank = torch.arange(size, device=probs.device)
    probs *= (probs >= settings.min_p * first) & (rank < settings.top_k)
    sums = probs.cumsum(dim=-1)
    rest = sums[:, -1:] + others
    reached = settings.top_p * rest
    ends = none | (every & (sums[:, -1:] >= reached + SLACK))  # whether what is kept ends in the head
    least, most = ((probs * (sums - probs < reached + e)).sum(-1, keepdim=True) for e in (-SLACK, SLACK))
    # Top-p keeps tokens until they sum to `reached`; the one that passes it is at most as likely as `last`.
    least = torch.where(ends, least, reached)
    most = torch.where(ends, most, (reached + last).minimum(rest))
    found, other = (
        torch.searchsorted(sums, settings.uniform * kept + e, right=True)
        for kept, e in ((least, -SLACK), (most, SLACK))
    )
    certain = (ends | every) & (found == other) & (found < size)
    return ids.gather(1, order.gather(1, found.clamp_(max=size - 1)))[:, 0], certain[:, 0]
