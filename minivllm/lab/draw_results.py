"""Above the chapters: pictures that compare: the throughput of several runs, and numbers as bars.

As in `draw.py`, every picture is a pure function onto a matplotlib figure. Lines differ in colour and in
dashes, bars in colour and in hatching, and the numbers stand beside them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

from minivllm.lab.draw import LINE
from minivllm.lab.throughput import tokens_over_time, window_for

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from minivllm.step import Step

# Okabe and Ito's colours that show as a line on white, and dashes: five times four differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
FILLS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
HATCHES = ("", "////", "....", "xxxx", r"\\\\", "++++")
NOT_MEASURED = "not measured yet"
NAME_WIDTH, TITLE_WIDTH = 26, 66  # characters on one line
PER_CHARACTER = 0.013  # of the width of the axes, at the size in which values are written


def draw_throughput(runs: Mapping[str, Sequence[Step]]) -> Figure:
    """Above, the output tokens so far: the steeper, the faster. Below, tokens per second in equal windows.

    runs: name -> steps; each begins at 0. The legend has every run's tokens and its mean rate. Raises
    ValueError for no runs, and for a run without steps or whose steps took no time.
    """
    if not runs:
        raise ValueError("A picture of throughput needs at least one run.")
    found = {}
    for name, steps in runs.items():
        try:
            found[name] = tokens_over_time(list(steps))
        except ValueError as error:
            raise ValueError(f"The run {name!r}: {error}") from error
    longest = max(run.seconds for run in found.values())
    window = window_for(longest)
    scale, unit = (1, "s") if longest >= 2 else (1000, "ms")
    labels = [f"{n}: {run.tokens:,} tokens, {_text(run.mean_rate)} tokens/s" for n, run in found.items()]
    columns = 2 if len(labels) > 1 and max(map(len, labels)) < 48 else 1
    figure = _figure(4.2 + 0.2 * math.ceil(len(labels) / columns))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for i, (name, run) in enumerate(found.items()):
        look: dict[str, Any] = {"color": COLOURS[i % 5], "linestyle": DASHES[i % 4], "linewidth": 2}
        at = [t * scale for t in run.times]
        above.plot(at, run.counts, label=labels[i], gid=f"tokens {name}", **look)
        end: dict[str, Any] = {"marker": "o", "markersize": 5, "linestyle": "", "color": look["color"]}
        above.plot([run.seconds * scale], [run.tokens], gid=f"end {name}", clip_on=False, **end)
        edges, rates = run.rates(window)
        below.stairs(rates, [e * scale for e in edges], baseline=None, gid=f"rate {name}", **look)
    above.set(xlim=(0, longest * scale * 1.01), ylabel="output tokens so far")
    above.set_ylim(0, 1.08 * max(run.tokens for run in found.values()))
    below.set_ylim(0, 1.1 * below.dataLim.ymax)
    below.set_ylabel(f"output tokens/s\nin windows of {window * scale:g} {unit}")
    below.set_xlabel(f"time since the run's first step ({unit})")
    for ax in (above, below):
        _finish(ax)
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 3}
    legend = figure.legend(loc="outside upper center", ncols=columns, **style)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def draw_bars(
    values: Mapping[str, float | None] | Mapping[str, Mapping[str, float | None]],
    *,
    unit: str,
    title: str,
    stacked: bool = False,
    form: str | None = None,
) -> Figure:
    """Horizontal bars from the top down, each with its value beside it.

    values: name -> value, or name -> series -> value, such as published beside ours; with stacked, the
    series of a name follow each other in one bar, as shares of a whole. None is "not measured yet".
    form: a format specification for the values, such as ".1f"; by default three digits.

    Raises ValueError for no values, for one that is negative or not finite, and for names and series mixed.
    """
    groups, series = _checked(values)
    across = len(series) if len(series) > 1 and not stacked else 1
    lines = max(len(textwrap.wrap(name, NAME_WIDTH)) for name in groups)
    step = max(0.24 * across, 0.17 * lines) + 0.16  # inches for one name
    figure = _figure(step * len(groups) + (1.3 if len(series) > 1 else 1.0))
    ax = figure.subplots()
    whole = max(sum(value or 0 for value in parts.values()) for parts in groups.values())
    reach = 0.0
    for y, parts in enumerate(groups.values()):
        if stacked:
            reach = max(reach, _draw_stack(ax, y, parts, series, form, whole))
        else:
            reach = max(reach, _draw_group(ax, y, parts, series, form))
    ax.set(xlim=(0, reach or 1), ylim=(len(groups) - 0.5, -0.5))
    ax.set_yticks(range(len(groups)), [textwrap.fill(name, NAME_WIDTH) for name in groups], fontsize=9)
    ax.set_xlabel(unit, fontsize=9, parse_math=False)
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH), fontsize=11, fontweight="bold", parse_math=False)
    for text in ax.get_yticklabels():
        text.set_parse_math(False)
    ax.tick_params(axis="y", length=0)
    if stacked:  # behind the longest bar there is only text
        ax.set_xticks([tick for tick in MaxNLocator(6).tick_values(0, whole or 1) if tick <= whole * 1.001])
    _finish(ax)
    if len(series) > 1:
        handles = [Patch(label=name, **_look(i)) for i, name in enumerate(series)]
        style: dict[str, Any] = {"frameon": False, "fontsize": 9, "handleheight": 1.2}
        legend = figure.legend(
            handles=handles, loc="outside lower center", ncols=min(4, len(series)), **style
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def _checked(values: Any) -> tuple[dict[str, dict[str, float | None]], list[str]]:
    """name -> series -> value, and all series in order; plain values are of one series without a name."""
    nested = [isinstance(value, Mapping) for value in values.values()]
    if not nested or any(nested) != all(nested):
        raise ValueError("Bars need name -> value, or name -> series -> value for every name; one at least.")
    groups = {str(n): dict(v) if isinstance(v, Mapping) else {"": v} for n, v in values.items()}
    series = list(dict.fromkeys(name for parts in groups.values() for name in parts))
    for name, parts in groups.items():
        for part, value in parts.items():
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < math.inf):
                raise ValueError(f"{' '.join(filter(None, (name, part)))} is {value!r}: a bar needs a number "
                                 "of at least 0, or None where it was not measured.")  # fmt: skip
    if not series:
        raise ValueError("Bars need at least one value.")
    return groups, series


def _draw_group(
    ax: Axes, y: int, parts: Mapping[str, float | None], series: Sequence[str], form: str | None
) -> float:
    """One bar below another; returns how far the longest reaches with its value."""
    height, reach = 0.76 / len(series), 0.0
    for i, name in enumerate(series):
        if name not in parts:
            continue
        value, at = parts[name], y - 0.38 + (i + 0.5) * height
        text = NOT_MEASURED if value is None else _text(value, form)
        ax.barh(at, value or 0, height * 0.92, gid=f"bar {name}".strip(), **_look(i))
        note = {"fontsize": 9, "va": "center", "style": "italic" if value is None else "normal"}
        _note(ax, value or 0, at, text, **note)
        reach = max(reach, (value or 0) / (1 - PER_CHARACTER * (len(text) + 1)))
    return reach


def _draw_stack(
    ax: Axes, y: int, parts: Mapping[str, Any], series: Sequence[str], form: str | None, whole: float
) -> float:
    """The parts one after another; values inside where they have room, else behind the bar, with names."""
    left, behind = 0.0, []
    for i, name in enumerate(series):
        value = parts.get(name)
        if value is None:
            behind += [f"{name} {NOT_MEASURED}"] if name in parts else []
            continue
        text = _text(value, form)
        ax.barh(y, value, 0.7, left=left, gid=f"bar {name}".strip(), **_look(i))
        if value > 1.5 * PER_CHARACTER * (len(text) + 1) * whole:  # notes may make the axis longer than whole
            halo = [withStroke(linewidth=3, foreground="white")]
            style: dict[str, Any] = {"fontsize": 9, "ha": "center", "va": "center_baseline"}
            ax.text(left + value / 2, y, text, gid="value", path_effects=halo, **style)
        elif value:
            behind.append(f"{name} {text}")
        left += value
    note = ", ".join(behind)
    _note(ax, left, y, note, fontsize=8, va="center")
    return left / (1 - min(0.6, 0.85 * PER_CHARACTER * (len(note) + 1)))


def _note(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    ax.annotate(text, (x, y), (4, 0), textcoords="offset points", gid="value", parse_math=False, **style)


def _look(i: int) -> dict[str, Any]:
    return {
        "facecolor": FILLS[i % len(FILLS)],
        "hatch": HATCHES[i % len(HATCHES)],
        "edgecolor": LINE,
        "linewidth": 0.6,
    }


def _text(value: float, form: str | None = None) -> str:
    """Three digits, and never fewer than there are before the point."""
    if form is not None:
        return format(value, form)
    if isinstance(value, Integral) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _figure(height: float) -> Figure:
    figure = Figure((7, height), dpi=100, layout="constrained")
    cast(ConstrainedLayoutEngine, figure.get_layout_engine()).set(w_pad=0.08, h_pad=0.08)
    return figure


def _finish(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=9)
    ax.xaxis.label.set_fontsize(9)
    ax.yaxis.label.set_fontsize(9)
