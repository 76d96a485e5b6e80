"""Above the chapters: the roofline: how fast a machine can do some work, from two numbers of each.

A machine has a rate at which it computes and a rate at which it moves bytes; work has FLOPs and bytes. The
work is done no sooner than the slower of the two allows, so its FLOP/s are at most

    min(flops_per_second, intensity x bytes_per_second)        intensity: FLOPs for each byte moved

which is a slope up to the ridge and flat beyond it. The model is Williams, Waterman and Patterson's
(Roofline, Communications of the ACM 52(4), 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from minivllm.errors import InvalidOption


def _check(name: str, value: object) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not float(value) > 0:  # type: ignore[arg-type]
        raise InvalidOption(f"{name}={value!r} is not possible: it must be a number above 0.")


@dataclass(frozen=True)
class Machine:
    """A device's two rates, in one dtype. source: "measured" or "published".

    Raises InvalidOption for a rate that is not above 0 and finite.
    """

    name: str
    dtype: str
    flops_per_second: float
    bytes_per_second: float
    source: str = "measured"

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second"):
            _check(name, getattr(self, name))

    @property
    def ridge(self) -> float:
        """The intensity, in FLOP/byte, at which computing takes as long as moving the bytes."""
        return self.flops_per_second / self.bytes_per_second

    def roof(self, intensity: float) -> float:
        """The most FLOP/s for work of this intensity."""
        return min(self.flops_per_second, intensity * self.bytes_per_second)

    def least_seconds(self, point: Point) -> float:
        """The time that this work takes at least."""
        return max(point.flops / self.flops_per_second, point.num_bytes / self.bytes_per_second)


@dataclass(frozen=True)
class Point:
    """Some work: its FLOPs, the bytes that must come from and go to memory, and how long it took.

    seconds: None where it was not measured. Raises InvalidOption for a number that is not above 0.
    """

    label: str
    flops: float
    num_bytes: float
    seconds: float | None = None

    def __post_init__(self) -> None:
        _check("flops", self.flops)
        _check("num_bytes", self.num_bytes)
        if self.seconds is not None:
            _check("seconds", self.seconds)

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.num_bytes

    @property
    def flops_per_second(self) -> float | None:
        """What was achieved; None where it was not measured."""
        return None if self.seconds is None else self.flops / self.seconds


# NVIDIA's figures for bfloat16 on tensor cores without sparsity. The Hopper sheets give the rate with
# sparsity, 1,979 TFLOP/s, and say so; without it is half of that, 989.4 before rounding.
# A100 80GB SXM: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf
# H100 SXM: https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306
# H200 SXM: https://www.nvidia.com/en-us/data-center/h200/
PEAKS = {
    machine.name: machine
    for machine in (
        Machine("A100 80GB SXM", "bfloat16", 312e12, 2.039e12, "published"),
        Machine("H100 SXM", "bfloat16", 989.4e12, 3.35e12, "published"),
        Machine("H200 SXM", "bfloat16", 989.4e12, 4.8e12, "published"),
    )
}


def format_si(value: float, unit: str) -> str:
    """Three digits with a decimal prefix: 9.89e14, "FLOP/s" -> 989 TFLOP/s. value: above 0."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    digits = f"{value:.2e}"  # rounded first: 999.9 GB/s is 1 TB/s
    power = min(len(prefixes) - 1, max(0, int(digits.split("e")[1]) // 3))
    return f"{float(digits) / 1000**power:.3g} {prefixes[power]}{unit}"
