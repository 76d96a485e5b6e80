"""Above the chapters: synthetic lengths of prompts and outputs, with the means of published data sets.

Kwon et al. (SOSP '23, arXiv 2309.06180, figure 11) give the mean lengths of the requests that they made from
ShareGPT and Alpaca. The data sets are not here. The lengths below are made up: log-normal, prompt and output
independent, with the spread that `lab/workload.py` takes from a public trace. The spread matters as much as
the mean: a long output also stays for more steps, so at any moment the running requests are longer than
the average request.
"""

from __future__ import annotations

import math
from random import Random
from statistics import NormalDist
from typing import Any

from minivllm.errors import InvalidOption
from minivllm.lab.published import MAX_MODEL_LEN, PUBLISHED_FIGURE_11, check_int
from minivllm.lab.workload import SIGMA

# As in vLLM's own ShareGPT benchmark (benchmarks/benchmark_serving.py), which passes over longer prompts.
LONGEST_PROMPT = 1024


def lengths(name: str, n: int, seed: int = 0, *, sigma: float = SIGMA) -> list[tuple[int, int]]:
    """n synthetic pairs (prompt_len, output_len) in tokens; name is "sharegpt" or "alpaca".

    Prompts are clipped to 1,024 tokens and outputs to what is left of 2,048. Both means are the published
    ones to within 1 % for n of 1,000 and more: a sample has one length from each n-th part of its
    distribution, in random order, and is scaled until it has the mean after clipping. Another n is another
    sample, not a longer one. sigma: the spread of the lengths' logarithms, to try another.

    Raises InvalidOption.
    """
    if name not in PUBLISHED_FIGURE_11:
        expected = " or ".join(map(repr, PUBLISHED_FIGURE_11))
        raise InvalidOption(f"name={name!r} is not possible: it must be {expected}.")
    check_int("n", n, 1)
    check_int("seed", seed, 0)
    _check_sigma(sigma)
    mean_prompt, mean_output = PUBLISHED_FIGURE_11[name]
    random = Random(f"{seed} {name}")
    prompts = _sample(random, mean_prompt, sigma, [LONGEST_PROMPT] * n)
    outputs = _sample(random, mean_output, sigma, [MAX_MODEL_LEN - prompt for prompt in prompts])
    return list(zip(prompts, outputs, strict=True))


def _sample(random: Random, mean: float, sigma: float, most: list[int]) -> list[int]:
    """One length for each bound in most, from 1 to it, together of this mean."""
    n = len(most)
    shares = [(i + random.random()) / n for i in range(n)]
    random.shuffle(shares)
    # A share of exactly 0 has no quantile; it comes once in 2^53 draws.
    raw = [math.exp(sigma * NormalDist().inv_cdf(max(share, 1e-12))) for share in shares]
    low, high = 0.0, mean / min(raw)  # between these factors: the last makes every length the mean or more
    for _ in range(50):
        factor = (low + high) / 2
        drawn = [min(bound, max(1, round(factor * value))) for value, bound in zip(raw, most, strict=True)]
        low, high = (factor, high) if sum(drawn) < mean * n else (low, factor)
    return drawn


def _check_sigma(sigma: Any) -> None:
    if not isinstance(sigma, (int, float)) or isinstance(sigma, bool) or not 0 <= sigma <= 2:
        raise InvalidOption(f"sigma={sigma!r} is not possible: it must be a number from 0 to 2.")
