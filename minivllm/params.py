"""Chapter 0: what a caller may ask of the sampler, under the names that vLLM gives it.

The objects are frozen: one `SamplingParams` can be shared by any number of requests. `BeamSearchParams` are
for chapter 4, which searches for a likely text instead of drawing one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from numbers import Integral, Real
from typing import Any

from minivllm.errors import InvalidOption

MAX_N = 16384  # a continuation is an object before it is a row: a slip such as n=10**9 costs nothing


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    n: how many continuations of the prompt, at most 16384; with a seed, number i is what seed + i would give
        alone.
    temperature: 0 takes the most likely token (greedy); 1 samples from the model's own distribution.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probabilities reach top_p; in (0, 1].
    min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
    seed: the same seed gives the same tokens, whatever else runs beside it; None leaves it to the engine.
    max_tokens: most tokens to generate, at least 1.
    ignore_eos: go on after the end-of-sequence token.
    min_tokens: no end-of-sequence token, stop token or stop string before so many tokens.
    stop: a string, or several, that end the text where they begin.
    stop_token_ids: tokens that end the text, beside the model's own.
    logprobs: report so many of the likeliest tokens for each token chosen, and always that token's own.
    presence_penalty: subtracted from the logit of each token that the output has; in [-2, 2].
    frequency_penalty: the same, times how often the output has it; in [-2, 2].
    repetition_penalty: divides the logit, or multiplies a negative one, of each token that prompt or
        output has; 1 changes nothing.
    logit_bias: token id -> added to its logit; from -100, which bans it, to 100.

    Raises InvalidOption for a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            self._check_number(name, getattr(self, name))
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            self._check_number(name, getattr(self, name))
        for name in ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs"):
            self._check_integer(name, getattr(self, name))
        self._check(1 <= self.n <= MAX_N, "n", f"from 1 to {MAX_N}")
        self._check(self.temperature >= 0, "temperature", "at least 0; 0 is greedy")
        self._check(self.top_k >= -1, "top_k", "0 or -1 (keep all), or at least 1")
        self._check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._check(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        self._check(self.seed is None or self.seed >= 0, "seed", "None, or at least 0")
        self._check(self.max_tokens >= 1, "max_tokens", "at least 1")
        self._check(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        self._check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens")
        self._check(self.logprobs is None or self.logprobs >= 0, "logprobs", "None, or at least 0")
        self._check(-2 <= self.presence_penalty <= 2, "presence_penalty", "from -2 to 2")
        self._check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "from -2 to 2")
        self._check(
            1e-3 <= self.repetition_penalty <= 1e3,
            "repetition_penalty",
            "from 0.001 to 1000; 1 changes nothing",
        )
        self._check_stops()
        for name, value in vars(self).items():  # a fraction, or a number of NumPy, as Python's own
            if _is_integer(value) or _is_number(value):
                object.__setattr__(self, name, int(value) if _is_integer(value) else float(value))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken and nothing is drawn."""
        return self.temperature == 0

    def _check_stops(self) -> None:
        stop = self._items("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._check(all(isinstance(s, str) and s for s in stop), "stop", "a text, or several, none empty")
        ids = self._items("stop_token_ids", self.stop_token_ids)
        self._check(all(_is_id(i) for i in ids), "stop_token_ids", "a list of token ids")
        bias = {} if self.logit_bias is None else self.logit_bias
        right = isinstance(bias, Mapping) and all(
            _is_id(i) and _is_number(b) and -100 <= b <= 100 for i, b in bias.items()
        )
        self._check(right, "logit_bias", "a table from token id to a number from -100 to 100")
        ids, bias = tuple(map(int, ids)), {int(i): float(b) for i, b in bias.items()}
        for name, value in (("stop", stop), ("stop_token_ids", ids), ("logit_bias", bias)):
            object.__setattr__(self, name, value)  # our own copy: the caller may change theirs

    def _items(self, name: str, value: Any) -> tuple[Any, ...]:
        right = value is None or (
            isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        )
        self._check(right, name, "a list")
        return () if value is None else tuple(value)

    def _check_number(self, name: str, value: Any) -> None:
        self._check(_is_number(value), name, "a finite number")

    def _check_integer(self, name: str, value: Any) -> None:
        right = _is_integer(value) and int(value).bit_length() < 64
        optional = name in ("seed", "logprobs") and value is None
        self._check(right or optional, name, "an integer of at most 63 bits")

    def _check(self, right: bool, name: str, expected: str) -> None:
        if not right:
            raise InvalidOption(f"{name}={getattr(self, name)!r} is not possible: it must be {expected}.")


@dataclass(frozen=True)
class BeamSearchParams:
    """How a beam search goes, and when it ends; early_stopping and length_penalty are Transformers'.

    beam_width: how many continuations are followed at once, and how many come back.
    max_tokens: most tokens of each, at least 1.
    length_penalty: from -10 to 10. A continuation is judged by the sum of its log-probabilities / length **
        length_penalty: 0 takes the sum, 1 the mean; the higher, the better for long ones.
    early_stopping: when a search that has found beam_width ended continuations is over. True: at once.
        False: when the best of those followed, judged as if it ended now, is no better than the worst found.
        "never": when it is no better even if it kept its sum up to the length that favours it most.
    ignore_eos: go on after the end-of-sequence token.

    Raises InvalidOption for a value outside its range, and for n.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    n: InitVar[None] = None

    def __post_init__(self, n: Any) -> None:
        if n is not None:
            raise InvalidOption(f"n={n!r} is not possible in a beam search: it gives beam_width results.")
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            self._check(_is_integer(value) and 1 <= value < 2**63, name, "an integer, at least 1")
            object.__setattr__(self, name, int(value))
        right = _is_number(self.length_penalty) and -10 <= self.length_penalty <= 10
        self._check(right, "length_penalty", "a number from -10 to 10; 1 judges by the mean")
        object.__setattr__(self, "length_penalty", float(self.length_penalty))
        early = self.early_stopping
        right = isinstance(early, bool) or (isinstance(early, str) and early == "never")
        self._check(right, "early_stopping", 'True, False or "never"')
        self._check(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")

    def _check(self, right: bool, name: str, expected: str) -> None:
        if not right:
            raise InvalidOption(f"{name}={getattr(self, name)!r} is not possible: it must be {expected}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return -1e300 < float(value) < 1e300  # NaN is below nothing
    except OverflowError:
        return False


def _is_id(value: Any) -> bool:
    return _is_integer(value) and 0 <= value < 2**63
