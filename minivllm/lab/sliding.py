"""Above the chapters: a slider over the steps of a run, which draws the memory of the step it stands on.

What it shows is made by the same function that draws the picture on a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from minivllm.errors import InvalidOption
from minivllm.lab.draw import draw_memory_map
from minivllm.lab.record import StepRecord, in_flight

try:
    from ipywidgets import HBox, Image, IntSlider, Layout, Play, VBox, jslink
except ImportError as error:
    raise InvalidOption(
        'A slider needs ipywidgets. Install it: pip install "minivllm[lab]". Without it, draw_film_strip '
        "shows several steps at once."
    ) from error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDEST_TITLE = 62  # characters: wider ones would push the map aside
WIDE = {"width": "700px", "max_width": "100%"}


def slider(
    records: Sequence[StepRecord], draw: Callable[..., Figure] = draw_memory_map, *, interval: int = 500
) -> StepSlider:
    """A widget for a notebook: a slider over a Recorder's records, and the memory of the step chosen.

    draw(snapshot, title=...) gives the picture. interval: milliseconds a step while it plays.
    Raises InvalidOption for no records, and for what is no list of them.
    """
    if not isinstance(records, Sequence) or not all(isinstance(record, StepRecord) for record in records):
        raise InvalidOption(
            f"A slider needs a list of step records, not {type(records).__name__}: "
            "give it `recorder.records`."
        )
    if not records:
        raise InvalidOption("A slider needs at least one record: run a step with the recorder as `on_step`.")
    return StepSlider(tuple(records), draw, interval)


class StepSlider(VBox):
    """`slider.value` is the position in `records`; `play` counts it up; `image` holds the picture's PNG."""

    def __init__(self, records: tuple[StepRecord, ...], draw: Callable[..., Figure], interval: int):
        self.records, self.draw = records, draw
        last = len(records) - 1
        self.slider = IntSlider(min=0, max=last, description="step", readout=False, layout=Layout(flex="1"))
        self.play = Play(min=0, max=last, interval=interval)
        self.image = Image(format="png", layout=Layout(**WIDE))
        # In the browser: a slider that waited for Python would lag behind.
        self.link = jslink((self.play, "value"), (self.slider, "value"))
        self.slider.observe(self._show, names="value")
        self._show()
        super().__init__([HBox([self.play, self.slider], layout=Layout(**WIDE)), self.image])

    def _show(self, change: Any = None) -> None:
        record = self.records[self.slider.value]
        self.image.value = as_png(self.draw(record.snapshot, title=title_of(record)))


def title_of(record: StepRecord) -> str:
    """The number of a step, and who was in flight: "step 7: 4 in flight (0-2, 5), 1 waiting".

    In flight are sequences; the numbers are those of their requests.
    """
    step = record.step
    ids = list({request.request_id % 2**32 for request in step.scheduled})
    groups = {"waiting": step.waiting, "preempted": step.preempted}
    others = "".join(f", {len(who)} {what}" for what, who in groups.items() if who)
    start = f"step {step.index}: {in_flight(step) or 'none'} in flight"
    who = shorten(_ranges(ids), WIDEST_TITLE - len(start + others) - 3, placeholder=" ...") if ids else ""
    return start + (f" ({who})" if who else "") + others


def _ranges(ids: Sequence[int]) -> str:
    """Sorted, and those in a row as one: 5, 2, 1, 0 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join("-".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs)


def as_png(figure: Figure) -> bytes:
    """The bytes of a figure's PNG file: the same for the same figure."""
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
