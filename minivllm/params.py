"""Chapter 0: what a caller may ask of the sampler, under the names that vLLM gives it.

The object is frozen: one `SamplingParams` can be shared by any number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from minivllm.errors import InvalidOption


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    temperature: 0 takes the most likely token (greedy); 1 samples from the model's own distribution.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probabilities reach top_p; in (0, 1].
    min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
    seed: the same seed gives the same tokens, whatever else runs beside it; None draws a fresh one.
    max_tokens: most tokens to generate, at least 1.
    ignore_eos: go on after the end-of-sequence token.

    Raises InvalidOption for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            self._check_number(name, getattr(self, name))
        for name in ("top_k", "max_tokens", "seed"):
            self._check_integer(name, getattr(self, name))
        self._check(self.temperature >= 0, "temperature", "at least 0; 0 is greedy")
        self._check(self.top_k >= -1, "top_k", "0 or -1 (keep all), or at least 1")
        self._check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._check(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        self._check(self.seed is None or self.seed >= 0, "seed", "None, or at least 0")
        if self.seed is not None:
            object.__setattr__(self, "seed", int(self.seed))  # random.Random knows no NumPy number
        self._check(self.max_tokens >= 1, "max_tokens", "at least 1")
        self._check(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and nothing is drawn."""
        return self.temperature == 0

    def _check_number(self, name: str, value: Any) -> None:
        number = isinstance(value, Real) and not isinstance(value, bool)
        self._check(number and -1e300 < value < 1e300, name, "a finite number")  # NaN is below nothing

    def _check_integer(self, name: str, value: Any) -> None:
        right = isinstance(value, Integral) and not isinstance(value, bool) and int(value).bit_length() < 64
        self._check(right or (name == "seed" and value is None), name, "an integer of at most 63 bits")

    def _check(self, right: bool, name: str, expected: str) -> None:
        if not right:
            raise InvalidOption(f"{name}={getattr(self, name)!r} is not possible: it must be {expected}.")
