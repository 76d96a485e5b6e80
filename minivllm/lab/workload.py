"""Above the chapters: a workload: requests with lengths and arrival times, made from a seed, kept in a file.

The file holds one JSON object a line: `prompt_token_ids` (or `prompt`, a text), `max_tokens`, and
`arrival` in seconds after the start, 0 where it is left out. A request of several samples has `n`, and one
that is not greedy `temperature` and `seed`; only the ladder runs these.

The same arguments give the same bytes in every process. Lengths, tokens and arrivals are drawn apart, so
another rate brings the same requests.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from random import Random
from typing import IO, Any

from minivllm.errors import InvalidOption
from minivllm.lab.request_file import (
    BadLine,
    expect,
    is_int,
    is_number,
    parse_lines,
    parse_object,
    read_bytes,
)

# The spread of the lengths' logarithms. Those of Azure's public trace of 2023 spread by 0.85 to 1.4; a
# little less than that keeps most lengths below the bounds, so that clipping hardly moves the mean.
SIGMA = 0.8
LAST_ARRIVAL = 1e9  # seconds: 30 years are enough
_KEYS = ("prompt_token_ids", "prompt", "max_tokens", "arrival", "n", "temperature", "seed")
_DEFAULTS = {"arrival": 0, "n": 1, "temperature": 0}


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: its prompt (token ids or text, one of the two), how many tokens to generate, and when
    it arrives, in seconds after the start. n samples of so many tokens each; temperature 0: greedy; number i
    is drawn from seed + i."""

    prompt_token_ids: tuple[int, ...] | None
    prompt: str | None
    max_tokens: int
    arrival: float = 0.0
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.prompt_token_ids is None) == (self.prompt is None):
            raise InvalidOption("A request has either prompt_token_ids or prompt, and not both.")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids. Raises InvalidOption for a request that has only text."""
        if self.prompt_token_ids is None:
            raise InvalidOption("This request's prompt is text; encode it with a tokenizer first.")
        return self.prompt_token_ids


def make_workload(
    n: int,
    seed: int = 0,
    mean_in: float = 160,
    mean_out: float = 128,
    max_in: int = 768,
    max_out: int = 512,
    rate: float | None = None,
    vocab_size: int = 49152,
) -> list[WorkloadRequest]:
    """n requests with log-normal lengths of these means, then clipped to 1..max.

    rate: Poisson arrivals, so many a second, the first at 0; None or infinity: all at 0. Token ids come
    from the middle half of the vocabulary, where no tokenizer keeps its special tokens.

    Raises InvalidOption.
    """
    _check_arguments(n, seed, mean_in, mean_out, max_in, max_out, rate, vocab_size)
    lengths, tokens = (Random(f"{seed} {what}") for what in ("lengths", "tokens"))
    ids = ids_for(vocab_size)
    requests = []
    for arrival in poisson_arrivals(n, math.inf if rate is None else rate, seed):
        num_in, num_out = _length(lengths, mean_in, max_in), _length(lengths, mean_out, max_out)
        prompt = tuple(tokens.randrange(ids.start, ids.stop) for _ in range(num_in))
        requests.append(WorkloadRequest(prompt, None, num_out, arrival))
    return requests


def ids_for(vocab_size: int) -> range:
    """The token ids that a made-up prompt may have: the middle half of a vocabulary."""
    return range(vocab_size // 4, 3 * vocab_size // 4)


def poisson_arrivals(n: int, rate: float, seed: int) -> list[float]:
    """n arrival times in seconds, the first at 0, `rate` a second on average; infinity: all at 0.

    Raises InvalidOption for a rate so low that a request would arrive after 30 years.
    """
    gaps, arrival, arrivals = Random(f"{seed} gaps"), 0.0, []
    for _ in range(n):
        check_option(arrival <= LAST_ARRIVAL, "rate", rate, "higher: a request would arrive after 30 years")
        arrivals.append(round(arrival, 6))
        arrival += gaps.expovariate(rate) if math.isfinite(rate) else 0.0
    return arrivals


def _length(random: Random, mean: float, most: int) -> int:
    drawn = random.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)  # its mean is exp(mu + sigma^2 / 2)
    return min(most, max(1, round(drawn)))


def _check_arguments(
    n: Any, seed: Any, mean_in: Any, mean_out: Any, max_in: Any, max_out: Any, rate: Any, vocab_size: Any
) -> None:
    least = {"n": (n, 1), "max_in": (max_in, 1), "max_out": (max_out, 1), "vocab_size": (vocab_size, 2)}
    for name, (value, bound) in least.items():
        check_option(is_int(value) and value >= bound, name, value, f"a whole number of at least {bound}")
    check_option(is_int(seed), "seed", seed, "a whole number")
    for name, mean, most in (("mean_in", mean_in, max_in), ("mean_out", mean_out, max_out)):
        right = is_number(mean) and 1 <= mean <= most
        check_option(right, name, mean, f"a number from 1 to {name.replace('mean', 'max')}, which is {most}")
    check_rate(rate)


def check_rate(rate: Any) -> None:
    """Raises InvalidOption unless it is a number above 0, infinity among them, or None."""
    right = rate is None or (is_number(rate) and rate > 0)
    check_option(right, "rate", rate, "above 0 requests a second, or inf (all at once)")


def check_option(right: bool, name: str, value: Any, expected: str) -> None:
    """Raises InvalidOption with the option's name unless its value is right."""
    if not right:
        raise InvalidOption(f"{name}={value!r} is not possible: it must be {expected}.")


def write_workload(to: str | PathLike[str] | IO[str], requests: Iterable[WorkloadRequest]) -> None:
    """Write requests to a path or an open text file. A file that is there is replaced whole or not at all."""
    lines = "".join(f"{json.dumps(_to_json(r), separators=(',', ':'))}\n" for r in requests)
    if isinstance(to, (str, PathLike)):
        write_whole(Path(to), lines)
    else:
        to.write(lines)


def _to_json(request: WorkloadRequest) -> dict[str, Any]:
    fields = {key: getattr(request, key) for key in _KEYS}
    return {
        key: v for key, v in fields.items() if v is not None and (key not in _DEFAULTS or v != _DEFAULTS[key])
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: nobody sees half of it. Raises OSError, and then nothing has changed."""
    path = Path(os.path.realpath(path))  # a link goes on pointing where it does
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced, only written to
        path.write_text(text, encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name[:64]}.") as scratch:
        part = Path(scratch, "part")  # not mkstemp, which would keep others from reading the file
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


def read_workload(path: str | PathLike[str]) -> list[WorkloadRequest]:
    """The requests in a file, in its order. Empty lines are passed over.

    Raises InvalidRequestFile, which names the file, the line, what is wrong and what was expected.
    """
    return parse_workload(path, read_bytes(path))


def parse_workload(path: str | PathLike[str], data: bytes) -> list[WorkloadRequest]:
    """`read_workload` of contents that were read before; the path is for the messages."""
    return parse_lines(path, data, _parse, "prompt_token_ids (or prompt) and max_tokens")


def _parse(line: bytes) -> WorkloadRequest:
    found = parse_object(line, _KEYS)
    for key in found:
        if key not in _KEYS:
            raise BadLine(f"the key {key!r} is not known; the keys are {', '.join(_KEYS)}.")
    ids: Any = found.get("prompt_token_ids")
    prompt: Any = found.get("prompt")
    most: Any = found.get("max_tokens")
    arrival: Any = found.get("arrival", 0)
    if (ids is None) == (prompt is None):
        raise BadLine(f"{'neither' if ids is None else 'both'} of prompt_token_ids and prompt; expected one.")
    if ids is not None:
        expect(isinstance(ids, list) and len(ids) > 0, "prompt_token_ids", ids, "a list of at least one id")
        for place, token in enumerate(ids):
            expect(is_int(token) and token >= 0, f"prompt_token_ids[{place}]", token, "a whole number from 0")
    else:
        expect(isinstance(prompt, str) and prompt != "", "prompt", prompt, "a text that is not empty")
        whole = not any("\ud800" <= character <= "\udfff" for character in prompt)
        expect(whole, "prompt", prompt, "a whole text, without half a surrogate pair")
    expect(is_int(most) and most >= 1, "max_tokens", most, "a whole number of at least 1")
    right = is_number(arrival) and 0 <= arrival <= LAST_ARRIVAL  # NaN is within nothing
    expect(right, "arrival", arrival, "finite seconds from 0 on")
    n, temperature, seed = found.get("n", 1), found.get("temperature", 0), found.get("seed")
    expect(is_int(n) and n >= 1, "n", n, "a whole number of at least 1")
    right = is_number(temperature) and 0 <= temperature <= 100
    expect(right, "temperature", temperature, "a number from 0, which is greedy, to 100")
    expect(seed is None or is_int(seed), "seed", seed, "a whole number")
    if (temperature > 0) != (seed is not None):
        raise BadLine(
            "temperature above 0 and seed belong together, so that the same tokens come each time; "
            f"expected {'a seed as well' if seed is None else 'a temperature above 0 as well'}."
        )
    ids = None if ids is None else tuple(ids)
    return WorkloadRequest(ids, prompt, most, float(arrival), n, float(temperature), seed)
