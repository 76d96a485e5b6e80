"""Above the chapters: a workload: requests with lengths and arrival times, made from a seed, kept in a file.

The file holds one JSON object a line: `prompt_token_ids` (or `prompt`, a text), `max_tokens`, and
`arrival` in seconds after the start, 0 where it is left out. The same arguments give the same bytes in
every process. Lengths, tokens and arrivals are drawn apart, so another rate brings the same requests.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from pathlib import Path
from random import Random
from typing import IO, Any

from minivllm.errors import InvalidOption, InvalidRequestFile

# The spread of the lengths' logarithms. Those of Azure's public trace of 2023 spread by 0.85 to 1.4; a
# little less than that keeps most lengths below the bounds, so that clipping hardly moves the mean.
SIGMA = 0.8
LAST_ARRIVAL = 1e9  # seconds: 30 years are enough
_KEYS = ("prompt_token_ids", "prompt", "max_tokens", "arrival")


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: its prompt (token ids or text, one of the two), how many tokens to generate, and when
    it arrives, in seconds after the start."""

    prompt_token_ids: tuple[int, ...] | None
    prompt: str | None
    max_tokens: int
    arrival: float = 0.0

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
    lengths, tokens, gaps = (Random(f"{seed} {what}") for what in ("lengths", "tokens", "gaps"))
    low, high = vocab_size // 4, 3 * vocab_size // 4
    requests, arrival = [], 0.0
    for _ in range(n):
        num_in, num_out = _length(lengths, mean_in, max_in), _length(lengths, mean_out, max_out)
        prompt = tuple(tokens.randrange(low, high) for _ in range(num_in))
        requests.append(WorkloadRequest(prompt, None, num_out, round(arrival, 6)))
        if rate is not None and math.isfinite(rate):
            arrival += gaps.expovariate(rate)
            _check(arrival <= LAST_ARRIVAL, "rate", rate, "higher: a request would arrive after 30 years")
    return requests


def _length(random: Random, mean: float, most: int) -> int:
    drawn = random.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)  # its mean is exp(mu + sigma^2 / 2)
    return min(most, max(1, round(drawn)))


def _check_arguments(
    n: Any, seed: Any, mean_in: Any, mean_out: Any, max_in: Any, max_out: Any, rate: Any, vocab_size: Any
) -> None:
    least = {"n": (n, 1), "max_in": (max_in, 1), "max_out": (max_out, 1), "vocab_size": (vocab_size, 2)}
    for name, (value, bound) in least.items():
        _check(_is_int(value) and value >= bound, name, value, f"a whole number of at least {bound}")
    _check(_is_int(seed), "seed", seed, "a whole number")
    for name, mean, most in (("mean_in", mean_in, max_in), ("mean_out", mean_out, max_out)):
        right = _is_number(mean) and 1 <= mean <= most
        _check(right, name, mean, f"a number from 1 to {name.replace('mean', 'max')}, which is {most}")
    right = rate is None or (_is_number(rate) and rate > 0)
    _check(right, "rate", rate, "above 0 requests a second, or inf (all at once)")


def _check(right: bool, name: str, value: Any, expected: str) -> None:
    if not right:
        raise InvalidOption(f"{name}={value!r} is not possible: it must be {expected}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


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
        key: value for key, value in fields.items() if value is not None and (key, value) != ("arrival", 0)
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
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise InvalidRequestFile(
            f"The request file {os.fspath(path)} cannot be read: {reason}. "
            "`minivllm workload --out FILE` makes one."
        ) from error
    requests = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                requests.append(_parse(line))
            except _BadLine as error:
                raise InvalidRequestFile(f"{os.fspath(path)}, line {number}: {error}") from error
    if not requests:
        raise InvalidRequestFile(
            f"{os.fspath(path)} holds no request; expected one JSON object a line, with "
            "prompt_token_ids (or prompt) and max_tokens."
        )
    return requests


class _BadLine(ValueError):
    """What is wrong with a line; `read_workload` adds where it stands."""


def _parse(line: bytes) -> WorkloadRequest:
    try:
        found = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise _BadLine(
            f"not UTF-8: byte {error.start} is {line[error.start]:#04x}; save it as UTF-8."
        ) from error
    except _BadLine:
        raise
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON ({error}); expected one JSON object on the line.") from error
    if not isinstance(found, dict):
        raise _BadLine(f"a JSON {type(found).__name__}; expected an object with {', '.join(_KEYS)}.")
    for key in found:
        if key not in _KEYS:
            raise _BadLine(f"the key {key!r} is not known; the keys are {', '.join(_KEYS)}.")
    ids: Any = found.get("prompt_token_ids")
    prompt: Any = found.get("prompt")
    most: Any = found.get("max_tokens")
    arrival: Any = found.get("arrival", 0)
    if (ids is None) == (prompt is None):
        raise _BadLine(
            f"{'neither' if ids is None else 'both'} of prompt_token_ids and prompt; expected one."
        )
    if ids is not None:
        _expect(isinstance(ids, list) and len(ids) > 0, "prompt_token_ids", ids, "a list of at least one id")
        for place, token in enumerate(ids):
            _expect(
                _is_int(token) and token >= 0, f"prompt_token_ids[{place}]", token, "a whole number from 0"
            )
    else:
        _expect(isinstance(prompt, str) and prompt != "", "prompt", prompt, "a text that is not empty")
        whole = not any("\ud800" <= character <= "\udfff" for character in prompt)
        _expect(whole, "prompt", prompt, "a whole text, without half a surrogate pair")
    _expect(_is_int(most) and most >= 1, "max_tokens", most, "a whole number of at least 1")
    right = _is_number(arrival) and 0 <= arrival <= LAST_ARRIVAL  # NaN is within nothing
    _expect(right, "arrival", arrival, "finite seconds from 0 on")
    return WorkloadRequest(None if ids is None else tuple(ids), prompt, most, float(arrival))


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _BadLine(
            f"a key stands there twice, among {', '.join(key for key, _ in pairs)}; expected each once."
        )
    return found


def _expect(right: bool, name: str, value: Any, expected: str) -> None:
    if not right:
        shown = json.dumps(value)
        raise _BadLine(f"{name} is {shown[:60] + '...' * (len(shown) > 60)}; expected {expected}.")
