"""Above the chapters: the ladder's results as pictures in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.lab.draw import draw_film_strip, draw_memory_maps
from minivllm.lab.draw_steps import draw_timeline, draw_utilisation
from minivllm.lab.ladder import RungResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_FRAMES = 6


def plot_ladder(results: Sequence[RungResult], folder: Path) -> Iterator[Path]:
    """Draw the kinds of memory side by side, each at its fullest step, then for every rung its timeline, and
    for each that keeps anything its memory over the steps. Yields the files written.
    """
    keeping = [r for r in results if r.fullest.snapshot.held]
    kinds = ("cache", "reservation", "sharing", "prefix_cache")
    first_of = {tuple(r.rung.options.get(o) for o in kinds): r for r in reversed(keeping)}
    if keeping:
        maps = {
            f"{r.rung.name}, {max(r.in_flight)} in flight": r.fullest.snapshot
            for r in reversed(first_of.values())
        }
        yield _save(draw_memory_maps(maps), folder / "memory.png")
    for r in results:
        steps = [record.step for record in r.records]
        yield _save(draw_timeline(steps), folder / f"timeline-{r.rung.name}.png", r)
    for r in keeping:
        last, count = len(r.records) - 1, min(NUM_FRAMES, len(r.records))
        frames = [r.records[round(i * last / max(count - 1, 1))] for i in range(count)]  # first to last
        titles = [f"step {record.step.index} of {last}" for record in frames]
        strip = draw_film_strip([record.snapshot for record in frames], titles=titles)
        yield _save(strip, folder / f"film-{r.rung.name}.png", r)
        yield _save(draw_utilisation(r.records), folder / f"utilisation-{r.rung.name}.png", r)


def _save(figure: Figure, path: Path, result: RungResult | None = None) -> Path:
    if result is not None:
        figure.suptitle(result.rung.name, fontsize=12, fontweight="bold")
    figure.savefig(path)
    return path
