"""The roofline: its arithmetic, how a machine is measured, and what stands on the picture."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minivllm import lab
from minivllm.errors import InvalidOption
from minivllm.lab import machine as measuring
from minivllm.lab.machine import measure_machine
from minivllm.lab.roofline import PEAKS, Machine, Point, format_si

SLOW = Machine("A slow one", "float32", 60e9, 12e9)
RATES = st.floats(1e-3, 1e18)

# --- arithmetic ---


def test_the_ridge_parts_what_bytes_hold_back_from_what_flops_do():
    assert SLOW.ridge == 5
    assert (SLOW.roof(0.5), SLOW.roof(5), SLOW.roof(70)) == (6e9, 60e9, 60e9)
    decode = Point("decode", 24e6, 12e6, seconds=0.002)
    assert (decode.intensity, decode.flops_per_second) == (2, 12e9)
    assert SLOW.least_seconds(decode) == 0.001, "its bytes"
    assert SLOW.least_seconds(Point("prefill", 24e6, 1e6)) == 24e6 / 60e9, "its FLOPs"
    assert Point("prefill", 24e6, 1e6).flops_per_second is None


@given(flops=RATES, num_bytes=RATES, rate=RATES, bandwidth=RATES)
def test_the_roof_and_the_least_time_say_the_same(flops, num_bytes, rate, bandwidth):
    machine, point = Machine("m", "float32", rate, bandwidth), Point("p", flops, num_bytes)
    assert machine.roof(point.intensity) * machine.least_seconds(point) == pytest.approx(flops)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "7", None, True], ids=str)
def test_a_number_that_is_not_above_zero_is_refused_by_name(value):
    with pytest.raises(InvalidOption, match=r"^flops_per_second="):
        Machine("m", "float32", value, 1)
    with pytest.raises(InvalidOption, match=r"^bytes_per_second="):
        Machine("m", "float32", 1, value)
    with pytest.raises(InvalidOption, match=r"^flops="):
        Point("p", value, 1)
    with pytest.raises(InvalidOption, match=r"^num_bytes="):
        Point("p", 1, value)
    if value is not None:
        with pytest.raises(InvalidOption, match=r"^seconds="):
            Point("p", 1, 1, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(989.4e12, "989 TFLOP/s"), (3.35e12, "3.35 TFLOP/s"), (999.9e9, "1 TFLOP/s"), (999.4e9, "999 GFLOP/s"),
     (60e9, "60 GFLOP/s"), (7, "7 FLOP/s"), (0.5, "0.5 FLOP/s"), (1234, "1.23 kFLOP/s"), (2e18, "2 EFLOP/s")],
)  # fmt: skip
def test_rates_have_three_digits_and_a_decimal_prefix(value, text):
    assert format_si(value, "FLOP/s") == text


def test_the_published_peaks_have_the_ridges_that_follow_from_them():
    assert {name: round(peak.ridge) for name, peak in PEAKS.items()} == {
        "A100 80GB SXM": 153, "H100 SXM": 295, "H200 SXM": 206,
    }  # fmt: skip
    assert {(peak.source, peak.dtype) for peak in PEAKS.values()} == {("published", "bfloat16")}


# --- measuring ---


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(measuring, "MATMUL_SIZES", {"cpu": (8, 13), "cuda": (8,)})
    monkeypatch.setattr(measuring, "NUM_BYTES", {"cpu": 4000, "cuda": 4000})
    monkeypatch.setattr(measuring, "_cache_bytes", lambda: 0)


def test_a_machine_is_measured_and_says_its_name_and_dtype(small):
    found = measure_machine(device="cpu", seconds=0.01)
    assert (found.dtype, found.source) == ("float32", "measured")
    assert found.name in lab.about() or torch.cuda.is_available()
    assert found.ridge > 0
    assert measure_machine("float64", device="cpu", seconds=0.01).dtype == "float64"


def test_the_largest_rates_count_and_a_copy_reads_and_writes(small, monkeypatch):
    """Work takes 2 s for a product of 8, 3 s of 13, 1 s to read the array, 1.6 s to copy it."""
    took = {"product of 8": 2.0, "product of 13": 3.0, "read": 1.0, "copy": 1.6}
    names = iter(took)
    monkeypatch.setattr(measuring, "_best", lambda work, device, seconds: took[next(names)])
    found = measure_machine(device="cpu", seconds=0.01)
    assert found.flops_per_second == 2 * 13**3 / 3 > 2 * 8**3 / 2
    assert found.bytes_per_second == 2 * 4000 / 1.6 > 4000 / 1


@pytest.mark.parametrize("what", ["matmul", "memory"])
def test_what_is_timed_is_what_is_counted(what, small, monkeypatch):
    seen: list[Any] = []

    def one_second(work: Any, device: torch.device, seconds: float) -> float:
        seen.append(work())
        return 1.0

    monkeypatch.setattr(measuring, "_best", one_second)
    device = torch.device("cpu")
    if what == "matmul":
        assert measuring._matmul_rate(13, torch.float32, device, 1) == 2 * 13 * 13 * 13
        assert seen[0].shape == (13, 13)
        assert 13 / 8 < seen[0].mean() < 13 / 2, "sums of 13 products of numbers from 0 to 1"
    else:
        assert measuring._memory_rate(4000, device, 1) == 8000
        assert seen[0].item() == 1000
        assert torch.equal(seen[1], torch.ones(1000))


def test_the_fastest_run_counts_and_the_first_does_not(monkeypatch):
    now = [0.0]
    lengths = iter([0.1, 5, 3, 4, 100])  # the first warms up: no run of 0.1 counts
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += next(lengths)

    assert measuring._best(work, torch.device("cpu"), seconds=0.01) == 3
    assert next(lengths) == 100, "three runs, although the first used up the time"


def test_an_array_is_larger_than_the_cache_and_leaves_room(tmp_path, monkeypatch):
    size = tmp_path / "size"
    for text, num_bytes in (("32768K\n", 2**25), ("512", 512), ("", 0), ("much", 0)):
        size.write_text(text)
        assert measuring._cache_bytes(size) == num_bytes
    assert measuring._cache_bytes(tmp_path / "nothing") == 0
    for cache, free, expected in ((0, 2**40, 2**28), (2**30, 2**40, 2**32), (2**30, 2**30, 2**27)):
        monkeypatch.setattr(measuring, "_cache_bytes", lambda cache=cache: cache)
        memory = type("Memory", (), {"available": free})
        monkeypatch.setattr(measuring.psutil, "virtual_memory", lambda memory=memory: memory)
        assert measuring._bytes_beyond_caches(torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "int8"}, "dtype='int8'"), ({"seconds": 0}, "seconds=0"), ({"device": "tpu"}, "device='tpu'"),
     ({"seconds": float("nan")}, "seconds=nan")],
    ids=["dtype", "seconds", "device", "nan"],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        measure_machine(**options)


# --- picture ---

POINTS = [
    Point("decode, batch 1", 3e6, 6e6, seconds=0.001),
    Point("decode, $8", 24e6, 6e6),
    Point("prefill", 1e9, 8e6, seconds=0.0125),
]


def png(figure: Figure) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(file := BytesIO(), format="png")
    assert figure.get_size_inches()[0] * figure.dpi == 700
    return file.getvalue()


def line(figure: Figure, gid: str) -> Any:
    (found,) = [found for found in figure.axes[0].lines if found.get_gid() == gid]
    return found


def test_the_roof_has_its_ridge_with_its_value_and_others_are_dashed():
    figure = lab.draw_roofline(SLOW, POINTS, others=list(PEAKS.values()))
    (ax,) = figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    x, y = line(figure, "roof A slow one").get_data()
    assert (x[1], y[1]) == (5, 60e9)
    assert list(y) == [SLOW.roof(at) for at in x]
    assert [text.get_text() for text in ax.texts if text.get_gid() == "ridge"] == ["ridge 5"]
    assert line(figure, "roof A slow one").get_linestyle() == "-"
    dashes = {line(figure, f"roof {name}").get_linestyle() for name in PEAKS}
    assert len(dashes) == 3
    assert "-" not in dashes
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[0] == "A slow one, float32, measured: 60 GFLOP/s, 12 GB/s, ridge at 5"
    assert legend[2] == "H100 SXM, bfloat16, published: 989 TFLOP/s, 3.35 TB/s, ridge at 295"
    assert png(figure) == png(lab.draw_roofline(SLOW, POINTS, others=list(PEAKS.values())))


def test_timed_work_stands_at_what_it_achieved_and_other_work_hollow_on_the_roof():
    figure = lab.draw_roofline(SLOW, POINTS)
    found = [line(figure, f"point {number}") for number in (1, 2, 3)]
    assert [(*p.get_xdata(), *p.get_ydata()) for p in found] == [(0.5, 3e9), (4, 48e9), (125, 80e9)]
    assert [p.get_markerfacecolor() == "white" for p in found] == [False, True, False]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[1:] == [
        "1  decode, batch 1: 0.5 FLOP/byte, 3 GFLOP/s, 50% of the roof",
        "2  decode, $8: 4 FLOP/byte, at most 48 GFLOP/s, not measured",
        "3  prefill: 125 FLOP/byte, 80 GFLOP/s, 133% of the roof",
    ]
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts if text.get_gid() == "number"] == ["1", "2", "3"]
    bottom, top = ax.get_ylim()
    assert bottom < 3e9 < 80e9 < top
    assert len(png(figure)) < 100_000


def test_a_roof_without_work_and_names_of_any_length_are_drawn():
    long = Machine("a processor with a very long name " * 4, "float32", 1e9, 3e9)
    figure = lab.draw_roofline(long, [Point("some work with a long name " * 6, 1e3, 1e9)])
    png(figure)
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= 700
    png(lab.draw_roofline(PEAKS["H200 SXM"], []))
