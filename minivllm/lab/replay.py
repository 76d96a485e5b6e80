"""Above the chapters: a file of requests made ready to be replayed: which, how long, when, with what prompts.

The file is one of `minivllm workload`, or a trace without text, whose prompts are made up here:

- Azure: random tokens, each request its own.
- Mooncake: a block's tokens are made from its hash id and the seed. So prompts have in common what they had
  in that service, and prefix caching finds it again:

      hash_ids [7, 8]      600 tokens   512 of block 7, the first 88 of block 8
      hash_ids [7, 8, 9]  1030 tokens   512 of block 7, 512 of block 8, the first 6 of block 9
                                        |------ the first 600 are the same ------|

A request's tokens depend on its place in the trace, the lengths and the seed, not on how many others are
taken. What is changed is counted, so that nothing is cut or left out silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from random import Random
from typing import Any

from minivllm.errors import InvalidOption
from minivllm.lab.request_file import is_int, is_number, read_bytes
from minivllm.lab.traces import BLOCK, MOST_TOKENS, TraceRow, parse_trace, recognise
from minivllm.lab.workload import (
    LAST_ARRIVAL,
    WorkloadRequest,
    check_option,
    check_rate,
    ids_for,
    parse_workload,
    poisson_arrivals,
)

FORMATS = ("auto", "minivllm", "azure", "mooncake")


@dataclass(frozen=True)
class ReplayOptions:
    """How a file is replayed. None: as it is.

    n: the first n requests only: of a trace by arrival, else in the file's order.
    speedup: arrivals are divided by it. rate: Poisson arrivals, so many a second, instead of the file's.
    seed: for the prompts of a trace, and for `rate`.

    These are for traces alone, and in this order: scale_lengths: every length is multiplied by it and
    rounded. Mooncake's blocks get 512 times it tokens, at least 1, so what prompts have in common shrinks
    alike. A length that is 0 is raised to 1. max_in, max_out: a longer prompt keeps its first max_in tokens,
    a longer output is cut to max_out.

    Raises InvalidOption.
    """

    n: int | None = None
    speedup: float | None = None
    rate: float | None = None
    seed: int = 0
    scale_lengths: float | None = None
    max_in: int | None = None
    max_out: int | None = None

    def __post_init__(self) -> None:
        for name in ("n", "max_in", "max_out"):
            value: Any = getattr(self, name)
            right = value is None or (is_int(value) and value >= 1)
            check_option(right, name, value, "a whole number of at least 1")
        check_option(is_int(self.seed), "seed", self.seed, "a whole number")
        for name in ("speedup", "scale_lengths"):
            value = getattr(self, name)
            right = value is None or (is_number(value) and 0 < value <= 1e9)
            check_option(right, name, value, "a number above 0, at most 1e9")
        check_rate(self.rate)
        if self.speedup is not None and self.rate is not None:
            raise InvalidOption(
                f"speedup={self.speedup} is not possible beside rate={self.rate}, which replaces the file's "
                "arrivals. Leave one of them out."
            )


@dataclass(frozen=True)
class RequestFile:
    """A file that was read: its format, and its requests, or a trace's rows."""

    format: str
    requests: list[WorkloadRequest] = field(default_factory=list)
    rows: list[TraceRow] = field(default_factory=list)


@dataclass(frozen=True)
class Replay:
    """The requests to run; how many the file holds; and of those taken, how many prompts and outputs were
    cut, and how many lengths were raised to 1."""

    requests: list[WorkloadRequest]
    num_in_file: int
    prompts_cut: int = 0
    outputs_cut: int = 0
    lengths_raised: int = 0


def read_request_file(path: str | PathLike[str], format: str = "auto") -> RequestFile:
    """Read a file of one of FORMATS; "auto" looks at its first line.

    Raises InvalidOption, and InvalidRequestFile with the file, the line, what is wrong, what was expected.
    """
    check_option(format in FORMATS, "format", format, f"one of {', '.join(FORMATS)}")
    data = read_bytes(path)
    format = recognise(path, data) if format == "auto" else format
    if format == "minivllm":
        return RequestFile(format, requests=parse_workload(path, data))
    return RequestFile(format, rows=parse_trace(path, data, format))


def make_replay(file: RequestFile, options: ReplayOptions, vocab_size: int = 49152) -> Replay:
    """The requests of a file under these options. vocab_size: where a trace's tokens are drawn from.

    Raises InvalidOption.
    """
    found = len(file.requests or file.rows)
    taken = found if options.n is None else options.n
    check_option(taken <= found, "n", taken, f"at most {found}, the number of requests in the file")
    if file.format == "minivllm":
        for name in ("scale_lengths", "max_in", "max_out"):
            if getattr(options, name) is not None:
                raise InvalidOption(
                    f"{name}={getattr(options, name)} is not possible with requests that have their prompts: "
                    "it is for traces. `minivllm workload` has --mean-in, --mean-out, --max-in and --max-out."
                )
        replay = Replay(file.requests[:taken], found)
    else:
        replay = _from_trace(file.rows[:taken], found, options, vocab_size)
    return replace(replay, requests=_retime(replay.requests, options))


def _retime(requests: Sequence[WorkloadRequest], options: ReplayOptions) -> list[WorkloadRequest]:
    arrivals = [request.arrival for request in requests]
    if options.rate is not None:
        arrivals = poisson_arrivals(len(requests), options.rate, options.seed)
    elif options.speedup is not None:
        arrivals = [round(arrival / options.speedup, 6) for arrival in arrivals]
        in_time = max(arrivals) <= LAST_ARRIVAL
        check_option(in_time, "speedup", options.speedup, "higher: a request would arrive after 30 years")
    return [replace(request, arrival=at) for request, at in zip(requests, arrivals, strict=True)]


def _from_trace(rows: Sequence[TraceRow], found: int, options: ReplayOptions, vocab_size: int) -> Replay:
    check_option(is_int(vocab_size) and vocab_size >= 2, "vocab_size", vocab_size, "a whole number from 2 on")
    scale = 1 if options.scale_lengths is None else options.scale_lengths
    block = max(1, round(BLOCK * scale))
    ids = list(ids_for(vocab_size))  # a list, so that equal tokens are one object
    requests, cut_in, cut_out, raised = [], 0, 0, 0
    for number, row in enumerate(rows):
        num_in, num_out = round(row.num_in * scale), round(row.num_out * scale)
        if row.hash_ids:
            whole, rest = divmod(row.num_in, BLOCK)
            num_in = whole * block + min(block, round(rest * scale))
        raised += (num_in == 0) + (num_out == 0)
        num_in, num_out = max(1, num_in), max(1, num_out)
        kept_in, kept_out = min(num_in, options.max_in or num_in), min(num_out, options.max_out or num_out)
        cut_in, cut_out = cut_in + (kept_in < num_in), cut_out + (kept_out < num_out)
        fits = max(kept_in, kept_out) <= MOST_TOKENS
        check_option(fits, "scale_lengths", scale, f"lower: a length would be above {MOST_TOKENS:,}")
        sources = [f"block {hash_id}" for hash_id in row.hash_ids or ()] or [f"request {number}"]
        size = block if row.hash_ids else kept_in
        prompt = _tokens([f"{options.seed} {source}" for source in sources], size, kept_in, ids)
        arrival = round((row.microseconds - rows[0].microseconds) / 1e6, 6)
        requests.append(WorkloadRequest(prompt, None, kept_out, arrival))
    return Replay(requests, found, cut_in, cut_out, raised)


def _tokens(seeds: Sequence[str], size: int, length: int, ids: Sequence[int]) -> tuple[int, ...]:
    """The first `length` of the blocks of `size` tokens that these seeds give."""
    tokens: list[int] = []
    for seed in seeds:  # fewer of a block are its first ones
        tokens += Random(seed).choices(ids, k=min(size, length - len(tokens)))
        if len(tokens) == length:
            break
    return tuple(tokens)
