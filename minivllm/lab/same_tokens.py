"""Above the chapters: are two runs' tokens the same, and if not, was it a tie?

Two orders of the same sums give numbers that differ in their last bits. Where the two best tokens are
nearer to each other than that error, either may win, and neither run is wrong. Such a tie is not
waved through: the model is run once more in float64, on the tokens up to there, and the gap between the
two candidates must be below the error that float32 has at that very place.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Compare the tokens that two greedy runs gave after one prompt."""
    differing = [i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b]
    if not differing and len(expected) != len(got):
        return Comparison(min(len(expected), len(got)))
    if not differing:
        return Comparison()
    at = differing[0]
    batch = Batch.pack([(0, [*prompt, *expected[:at]], 0)], model.device)
    logits = model(batch, RecomputeStore())[0].double()
    exact = copy.deepcopy(model).double()(batch, RecomputeStore())[0]
    gap = (exact[expected[at]] - exact[got[at]]).abs().item()
    return Comparison(at, gap, (logits - exact).abs().max().item())
