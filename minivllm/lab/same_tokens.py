"""Above the chapters: are two runs' tokens the same, and if not, was it a tie?

Two orders of the same sums give numbers that differ in their last bits. Where the two best tokens are
nearer to each other than that error, either may win, and neither run is wrong. Such a tie is not
waved through: the model is run once more in float64, on the tokens up to there, and the gap between the
two candidates must be below the error that float32 has at that very place.

A sampled token is drawn: the probabilities stand side by side from high to low, and a number from 0 to 1 says
where to look.

    token          the            a         my    one  ...
    up to          0.55           0.80      0.92  0.97
    drawn  0.5499999               the; with an error of 0.000001, "a" as well
           0.70                              a, and nothing else

There it is a tie where the number lies within the error of the boundary between the two candidates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder


@dataclass(frozen=True)
class Comparison:
    """first_difference: index of the first token that differs, None where none does. gap, error: of the
    logits there, in float64 and against it; of a sampled token, of the probabilities."""

    first_difference: int | None = None
    gap: float = 0.0
    error: float = 0.0

    @property
    def verdict(self) -> str:
        """ "yes", "tie at token 17", or "NO, from token 17"."""
        if self.first_difference is None:
            return "yes"
        place = f"token {self.first_difference + 1}"
        return f"tie at {place}" if self.gap < self.error else f"NO, from {place}"


@torch.inference_mode()
def compare_tokens(
    model: Decoder, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> Comparison:
    """Compare the tokens that two greedy runs gave after one prompt.

    After a tie the two go different ways, so from there on each token of `got` is held to what float64
    says of its own prefix: it must be the best, or nearer to the best than the error.
    """
    if len(expected) != len(got):
        return Comparison(min(len(expected), len(got)), math.inf)
    first = _first_difference(expected, got)
    if first is None:
        return Comparison()
    rounded, exact = _logits(model, prompt, got)
    error = (rounded - exact).abs().amax(dim=-1)
    chosen = exact.gather(1, torch.tensor(got, device=model.device)[:, None])[:, 0]
    gap = exact.amax(dim=-1) - chosen
    gap[first] = max(gap[first], (exact[first, expected[first]] - chosen[first]).abs())
    return _worst(first, gap, error)


@torch.inference_mode()
def compare_sampled(
    model: Decoder,
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    temperature: float,
    generator: Random,
) -> Comparison:
    """Compare the tokens that two runs drew after one prompt, one number of the generator for each.

    generator: as it stood before the first token; it is used up. The error of a place is what the
    probabilities of all tokens differ by, in sum: no boundary can have moved further. As after a greedy tie,
    each later token of `got` is held to what float64 draws with its number from its own prefix.
    """
    if len(expected) != len(got):
        return Comparison(min(len(expected), len(got)), math.inf)
    first = _first_difference(expected, got)
    if first is None:
        return Comparison()
    rounded, exact = (logits.div(temperature).softmax(dim=-1) for logits in _logits(model, prompt, got))
    error = (rounded - exact).abs().sum(dim=-1)
    drawn = [generator.random() for _ in got]
    at = zip(exact, got, drawn, error.tolist(), strict=True)
    gap = torch.tensor([distance(*place) for place in at], dtype=torch.float64)
    other = distance(exact[first], expected[first], drawn[first], error[first].item())
    gap[first] = max(gap[first].item(), other)
    return _worst(first, gap, error.cpu())


def distance(probs: Tensor, token: int, drawn: float, error: float) -> float:
    """How far a drawn number is from where a token stands; 0 where the token may be drawn.

    probs [vocab_size]. Tokens stand side by side, the likelier first; of those whose probabilities differ by
    no more than the error, either may be first.
    """
    p = probs[token]
    start = probs[probs > p + error].sum().item()
    end = probs[probs >= p - error].sum().item()
    return max(0.0, start - drawn, drawn - end)


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)


def _logits(model: Decoder, prompt: Sequence[int], got: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logits that each token of `got` was chosen from, in the model's dtype and in float64."""
    tokens = [*prompt, *got]
    batch = Batch.pack([(0, tokens[:-1], 0)], model.device)
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1, device=model.device)
    batch = replace(batch, logits_indices=rows)
    rounded = model(batch, RecomputeStore()).double()
    return rounded, copy.deepcopy(model).double()(batch, RecomputeStore())


def _worst(first: int, gap: Tensor, error: Tensor) -> Comparison:
    """The place that is most wrong, from the first difference on; the first where none is."""
    worst = first + int((gap - error)[first:].argmax())
    if gap[worst] < error[worst]:
        worst = first
    return Comparison(worst, gap[worst].item(), error[worst].item())


def verdict_of_many(comparisons: Iterable[Comparison], names: Sequence[str] | None = None) -> str:
    """ "yes" where all agree, ties counted; else the first that does not, by its name or its number.

    names: of the requests, or of their sequences, such as "3.1".
    """
    verdicts = [comparison.verdict for comparison in comparisons]
    for number, verdict in enumerate(verdicts):
        if verdict.startswith("NO"):
            name = str(number) if names is None else names[number]
            return f"NO, request {name} from {verdict.removeprefix('NO, from ')}"
    ties = sum(verdict.startswith("tie") for verdict in verdicts)
    return "yes" if not ties else f"yes, {ties} tie{'s' * (ties > 1)}"
