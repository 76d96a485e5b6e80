"""Above the chapters: when requests come and how long a step takes, for the paper's Poisson load.

The PagedAttention paper (Kwon et al., SOSP '23) gives no step times, and a mean batch under a load that a
system keeps up with is a matter of its speed. So the time is derived from the paper's own figure 13.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random

from minivllm.lab.published import PUBLISHED_FIGURE_11, PUBLISHED_FIGURE_13, PUBLISHED_FIGURE_13_RATE


def poisson_arrivals(n: int, rate: float, seed: int = 0) -> list[float]:
    """n times in seconds, rate of them a second on average, in order."""
    random = Random(f"{seed} arrivals")
    return list(accumulate(random.expovariate(rate) for _ in range(n)))


def implied_step_seconds(running: int) -> float:
    """Seconds of a step with so many running requests, as the paper's own vLLM seems to have taken.

    A system that keeps up makes rate x mean output tokens a second, and a step makes one for each running
    request: so a step takes batch / (rate x mean output) seconds. Figure 13 has vLLM's batch at two rates,
    which gives 45.0 ms with 30.42 requests and 75.5 ms with 132.44. This is the line through the two.

    It was made from vLLM's two batches, so getting these back shows only that the memory does not stand in
    the way. That the other schemes fall behind at the same speed was not put in.
    """
    (x0, y0), (x1, y1) = (_implied_step(name) for name in PUBLISHED_FIGURE_13)
    return y0 + (running - x0) * (y1 - y0) / (x1 - x0)


def _implied_step(name: str) -> tuple[float, float]:
    """vLLM's batch on one data set, and the seconds of a step that follow from it."""
    batch = PUBLISHED_FIGURE_13[name]["paged"]
    return batch, batch / (PUBLISHED_FIGURE_13_RATE[name] * PUBLISHED_FIGURE_11[name][1])
