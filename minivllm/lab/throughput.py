"""Above the chapters: output tokens over time, as plain data to draw.

A step gives a token to each sequence that takes part, and none for a chunk of a prompt. Its tokens count as
coming evenly while it runs, and none come between steps; so the rates of all windows, each times its length,
add up to all tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.step import Step


@dataclass(frozen=True)
class TokensOverTime:
    """One run. times: seconds since its first step began, from 0 on, never falling. counts: output tokens
    by then; between two times they grow evenly."""

    times: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """How long the run took."""
        return self.times[-1]

    @property
    def tokens(self) -> int:
        """All output tokens."""
        return round(self.counts[-1])

    @property
    def mean_rate(self) -> float:
        """Output tokens per second over the whole run."""
        return self.tokens / self.seconds

    def count_at(self, time: float) -> float:
        """Output tokens by then."""
        i = bisect_right(self.times, time)
        if i == len(self.times):
            return self.counts[-1]
        if i == 0:
            return 0.0
        before, after = self.times[i - 1], self.times[i]
        part = (time - before) / (after - before)
        return self.counts[i - 1] + part * (self.counts[i] - self.counts[i - 1])

    def rates(self, window: float) -> tuple[list[float], list[float]]:
        """Edges of windows of so many seconds, the last cut at the run's end; output tokens/s in each."""
        whole = math.floor(self.seconds / window + 1e-9)
        edges = [i * window for i in range(whole + 1)]
        if self.seconds - edges[-1] > 1e-6 * window:
            edges.append(self.seconds)
        counts = [self.count_at(edge) for edge in edges]
        pairs = range(len(edges) - 1)
        return edges, [(counts[i + 1] - counts[i]) / (edges[i + 1] - edges[i]) for i in pairs]


def tokens_over_time(steps: Sequence[Step]) -> TokensOverTime:
    """What some steps produced. Raises ValueError for no steps, and for steps that took no time."""
    if not steps:
        raise ValueError("There are no steps, so there is no throughput.")
    zero, total = steps[0].start, 0
    times, counts = [], []
    for step in steps:
        times += [step.start - zero, step.end - zero]
        counts += [total, total + step.num_sampled]
        total += step.num_sampled
    if not times[-1] > 0:
        raise ValueError("The steps took no time at all, so there is no throughput.")
    return TokensOverTime(tuple(times), tuple(counts))


def window_for(seconds: float, num_windows: int = 30) -> float:
    """A round length, 1, 2 or 5 times a power of ten seconds: about so many windows in a run."""
    rough = seconds / num_windows
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(step * unit for step in (1, 2, 5, 10) if step * unit >= rough * (1 - 1e-9))
