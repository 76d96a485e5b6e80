"""Above the chapters: the figures that a benchmark may be asked for: percentiles, arrival rate, goodput.

Goodput is the requests a second that kept every latency bound of a service-level objective (SLO), spelled
and counted as `vllm bench serve --goodput` does (vllm/benchmarks/serve.py): `ttft:500 tpot:50 e2el:5000`
bounds the time to first token, the time per output token and the end-to-end latency, in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minivllm.errors import InvalidOption
from minivllm.outputs import RequestMetrics

PERCENTILES = (50, 90, 99)
BOUNDS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e_latency"}  # vLLM's key -> what RequestMetrics calls it


def parse_percentiles(text: str) -> tuple[float, ...]:
    """(50, 99.9) of "50,99.9", in that order. Raises InvalidOption."""
    found = []
    for part in text.split(","):
        value = _number(part)
        if not 0 <= value <= 100:  # NaN, too
            raise InvalidOption(
                f"percentiles={text!r} is not possible: {part.strip()!r} is no number from 0 to 100. "
                "Give some with commas between them: 50,90,99."
            )
        found.append(int(value) if value.is_integer() else value)
    if len(set(found)) < len(found):
        raise InvalidOption(f"percentiles={text!r} is not possible: one stands there twice. Leave one out.")
    return tuple(found)


def spread(seconds: Iterable[float | None], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds, by the names mean, p50, ...; values that are None do not count.

    A percentile between two values lies on the straight line between them. Without values, all are None.
    """
    import numpy

    known = [1e3 * value for value in seconds if value is not None]
    names = ("mean", *(f"p{percent}" for percent in percentiles))
    if not known:
        return dict.fromkeys(names)
    found = [sum(known) / len(known), *numpy.percentile(known, percentiles)]
    return {name: round(float(value), 3) for name, value in zip(names, found, strict=True)}


def offered_rate(arrivals: Sequence[float]) -> float | None:
    """Requests a second until the last one arrives, in a run that starts at 0; None where all arrive then.

    The same requests over the time to the last token are what was finished, which is never more. Far less
    means that the engine fell behind, or that the run was short against the time of its last request.
    """
    last = max(arrivals, default=0.0)
    return len(arrivals) / last if last > 0 else None


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """{"ttft": 500.0, "tpot": 50.0} of ["ttft:500", "tpot:50"], or of one text with spaces between its pairs.

    Raises InvalidOption.
    """
    slo: dict[str, float] = {}
    for pair in (part for text in pairs for part in text.split()):
        key, _, value = pair.partition(":")
        if key not in BOUNDS or not 0 <= _number(value) < math.inf:
            raise InvalidOption(
                f"goodput={pair!r} is not possible: it must be KEY:VALUE, KEY one of {', '.join(BOUNDS)}, "
                "VALUE milliseconds from 0 on, as in ttft:500."
            )
        if key in slo:
            raise InvalidOption(f"goodput={pair!r} is not possible: {key} has a bound already. Give one.")
        slo[key] = float(value)
    return slo


def goodput(
    metrics: Sequence[RequestMetrics], slo: Mapping[str, float], seconds: float | None
) -> dict[str, Any]:
    """How the requests kept an SLO, {"ttft": milliseconds, ...}, in a run of so many seconds.

    slo_ms: the bounds. good: requests with no latency above its bound. missed: for each bound, the requests
    above it; one request can miss several. req_s: the goodput, good requests a second.

    A request of one token has no TPOT; it counts as 0 there, as in vLLM, so it never misses that bound. A
    request without a token misses every bound.
    """
    missed = {key: [not _kept(m, key, bound) for m in metrics] for key, bound in slo.items()}
    good = sum(not any(of_one) for of_one in zip(*missed.values(), strict=True))
    return {
        "slo_ms": dict(slo),
        "good": good,
        "missed": {key: sum(of_all) for key, of_all in missed.items()},
        "req_s": round(good / seconds, 4) if seconds else None,
    }


def _kept(metrics: RequestMetrics, key: str, bound: float) -> bool:
    latency = getattr(metrics, BOUNDS[key])
    return bool(metrics.token_times) and (latency or 0.0) <= bound / 1e3


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
