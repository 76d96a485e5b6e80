"""Above the chapters: are two runs' tokens the same, and if not, was it a tie?

Two orders of the same sums give numbers that differ in their last bits. Where the two best tokens are
nearer to each other than that error, either may win, and neither run is wrong. Such a tie is not
waved through: the model is run once more in float64, on the tokens up to there, and the gap between the
two candidates must be below the error that float32 has at that very place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder


@dataclass(frozen=True)
class Comparison:
    """first_difference: index of the first token that differs, None where none does. gap, error: of the
    logits there, in float64 and against it."""

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
    differing = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
    if not differing:
        return Comparison()
    first = differing[0]
    tokens = [*prompt, *got]
    batch = Batch.pack([(0, tokens[:-1], 0)], model.device)
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1, device=model.device)
    batch = replace(batch, logits_indices=rows)  # the logits that each token of `got` was chosen from
    rounded = model(batch, RecomputeStore()).double()
    exact = copy.deepcopy(model).double()(batch, RecomputeStore())
    error = (rounded - exact).abs().amax(dim=-1)
    chosen = exact.gather(1, torch.tensor(got, device=model.device)[:, None])[:, 0]
    gap = exact.amax(dim=-1) - chosen
    gap[first] = max(gap[first], (exact[first, expected[first]] - chosen[first]).abs())
    worst = first + int((gap - error)[first:].argmax())
    if gap[worst] < error[worst]:
        worst = first
    return Comparison(worst, gap[worst].item(), error[worst].item())


def verdict_of_many(comparisons: Iterable[Comparison]) -> str:
    """ "yes" where all requests agree, ties counted; else the first request that does not."""
    verdicts = [comparison.verdict for comparison in comparisons]
    for number, verdict in enumerate(verdicts):
        if verdict.startswith("NO"):
            return f"NO, request {number} from {verdict.removeprefix('NO, from ')}"
    ties = sum(verdict.startswith("tie") for verdict in verdicts)
    return "yes" if not ties else f"yes, {ties} tie{'s' * (ties > 1)}"
