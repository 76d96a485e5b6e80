"""A slider shows what the drawing function draws. No browser: widgets hold their state in Python."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from matplotlib.figure import Figure

from minivllm import lab
from minivllm.errors import InvalidOption
from minivllm.lab.draw import draw_memory_map
from minivllm.lab.record import Recorder, StepRecord
from minivllm.lab.sliding import as_png, title_of
from minivllm.memory.paged import PagedManager
from minivllm.step import ScheduledRequest, Step


def some_records(first: int = 0) -> list[StepRecord]:
    """Requests 3 and 8 grow, and 8 leaves before the last of 4 steps; step numbers from first on."""
    manager = PagedManager(num_blocks=5, block_size=4, bytes_per_token=8)
    recorder = Recorder(manager)
    for i, ids in enumerate([(3, 8), (3, 8), (3, 8), (3,)]):
        if 8 not in ids:
            manager.free(8)
        for k in ids:
            manager.allocate(k, 3 * i + (k == 3) + 1)
        recorder(Step(first + i, 0.0, 1.0, tuple(ScheduledRequest(k, i, 1) for k in ids)))
    return recorder.records


def test_each_position_of_the_slider_shows_the_picture_of_its_step():
    records = some_records(first=40)
    widget = lab.slider(records)
    assert (widget.slider.min, widget.slider.max) == (widget.play.min, widget.play.max) == (0, 3)
    shown = []
    for i in (0, 3, 1, 2):
        widget.slider.value = i
        direct = draw_memory_map(records[i].snapshot, title=title_of(records[i]))
        assert widget.image.value == as_png(direct)
        shown.append(widget.image.value)
    assert len(set(shown)) == 4, "every step has another picture"
    assert bytes(shown[0]).startswith(b"\x89PNG")
    assert max(map(len, shown)) < 100_000


def test_the_play_button_moves_the_slider_and_all_of_it_is_on_the_page():
    widget = lab.slider(some_records(), interval=250)
    (controls, image) = widget.children
    assert controls.children == (widget.play, widget.slider)
    assert image is widget.image
    assert widget.link.source == (widget.play, "value")
    assert widget.link.target == (widget.slider, "value")
    assert widget.play.interval == 250


def test_another_drawing_function_gets_the_snapshot_and_the_title():
    records = some_records()
    seen: list[tuple[Any, str]] = []

    def draw(snapshot: Any, title: str) -> Figure:
        seen.append((snapshot, title))
        return Figure((1, 1))

    widget = lab.slider(records, draw)
    widget.slider.value = 2
    assert seen == [(records[i].snapshot, title_of(records[i])) for i in (0, 2)]


def test_a_title_says_which_step_it_is_and_who_is_in_flight():
    records = some_records(first=7)
    assert title_of(records[0]) == "step 7: 2 in flight (3, 8)"
    assert title_of(records[3]) == "step 10: 1 in flight (3)"
    many = tuple(ScheduledRequest(i, 0, 1) for i in (9, 5, 6, 7, 2))
    group = Step(0, 0.0, 1.0, (ScheduledRequest(3, 0, 9, 4), ScheduledRequest(7, 0, 2, 0)))
    assert title_of(StepRecord(group, records[0].snapshot)) == "step 0: 5 in flight (3, 7)"
    parts = tuple(ScheduledRequest(3, 9, 1, 1, branch) for branch in range(4))
    parted = Step(1, 0.0, 1.0, (*parts, ScheduledRequest(5 + 2**32, 3, 1)))
    assert title_of(StepRecord(parted, records[0].snapshot)) == "step 1: 5 in flight (3, 5)"
    step = Step(2, 0.0, 1.0, many, preempted=(4,), waiting=(4, 20))
    assert title_of(StepRecord(step, records[0].snapshot)) == (
        "step 2: 5 in flight (2, 5-7, 9), 2 waiting, 1 preempted"
    )
    assert title_of(StepRecord(Step(3, 0, 1, ()), records[0].snapshot)) == "step 3: none in flight"


@pytest.mark.parametrize("n", [1, 40, 400])
def test_a_title_of_many_is_cut_where_an_id_ends_and_fits_its_line(n):
    scheduled = tuple(ScheduledRequest(3 * i + 1000, 0, 1) for i in range(n))
    step = Step(1234, 0.0, 1.0, scheduled, waiting=tuple(range(3000, 3300)), preempted=(7,))
    title = title_of(StepRecord(step, some_records()[0].snapshot))
    assert len(title) <= 62
    assert title.startswith(f"step 1234: {n} in flight (1000")
    assert title.endswith("), 300 waiting, 1 preempted")
    assert (" ...)" in title) == (n > 1)


def test_a_slider_of_one_step_stands_still():
    widget = lab.slider(some_records()[:1])
    assert (widget.slider.min, widget.slider.max) == (0, 0)
    assert widget.image.value


@pytest.mark.parametrize("what", ["no records", "a recorder", "snapshots"])
def test_what_has_no_steps_is_refused(what):
    records = some_records()
    given: Any = {
        "no records": [],
        "a recorder": Recorder(PagedManager(5, 4, 8), records),
        "snapshots": [record.snapshot for record in records],
    }[what]
    with pytest.raises(InvalidOption, match="at least one record" if not given else "recorder.records"):
        lab.slider(given)


def test_without_ipywidgets_the_error_says_what_to_install():
    code = """
import sys
sys.modules["ipywidgets"] = None
from minivllm import lab
from minivllm.errors import InvalidOption
try:
    lab.slider
except InvalidOption as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert 'needs ipywidgets. Install it: pip install "minivllm[lab]"' in done.stdout, done.stderr
