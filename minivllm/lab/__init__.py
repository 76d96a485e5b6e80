"""Above the chapters: measuring and showing what the engine does.

Notebooks take all they need from here by name; it is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.lab.draw import draw_film_strip as draw_film_strip
    from minivllm.lab.draw import draw_memory_map as draw_memory_map
    from minivllm.lab.draw import draw_memory_maps as draw_memory_maps
    from minivllm.lab.draw_results import draw_bars as draw_bars
    from minivllm.lab.draw_results import draw_throughput as draw_throughput
    from minivllm.lab.draw_roof import draw_roofline as draw_roofline
    from minivllm.lab.draw_steps import draw_timeline as draw_timeline
    from minivllm.lab.draw_steps import draw_utilisation as draw_utilisation
    from minivllm.lab.here import Scale as Scale
    from minivllm.lab.here import about as about
    from minivllm.lab.here import gpu_results as gpu_results
    from minivllm.lab.here import scale as scale
    from minivllm.lab.machine import measure_machine as measure_machine
    from minivllm.lab.record import Recorder as Recorder
    from minivllm.lab.roofline import PEAKS as PEAKS
    from minivllm.lab.roofline import Machine as Machine
    from minivllm.lab.roofline import Point as Point
    from minivllm.lab.sliding import slider as slider
    from minivllm.lab.tables import table as table

_HOME = {
    "draw_film_strip": "minivllm.lab.draw",
    "draw_memory_map": "minivllm.lab.draw",
    "draw_memory_maps": "minivllm.lab.draw",
    "draw_bars": "minivllm.lab.draw_results",
    "draw_throughput": "minivllm.lab.draw_results",
    "draw_roofline": "minivllm.lab.draw_roof",
    "draw_timeline": "minivllm.lab.draw_steps",
    "draw_utilisation": "minivllm.lab.draw_steps",
    "Scale": "minivllm.lab.here",
    "about": "minivllm.lab.here",
    "gpu_results": "minivllm.lab.here",
    "scale": "minivllm.lab.here",
    "measure_machine": "minivllm.lab.machine",
    "Recorder": "minivllm.lab.record",
    "Machine": "minivllm.lab.roofline",
    "PEAKS": "minivllm.lab.roofline",
    "Point": "minivllm.lab.roofline",
    "slider": "minivllm.lab.sliding",
    "table": "minivllm.lab.tables",
}
__all__ = [
    "PEAKS",
    "Machine",
    "Point",
    "Recorder",
    "Scale",
    "about",
    "draw_bars",
    "draw_film_strip",
    "draw_memory_map",
    "draw_memory_maps",
    "draw_roofline",
    "draw_throughput",
    "draw_timeline",
    "draw_utilisation",
    "gpu_results",
    "measure_machine",
    "scale",
    "slider",
    "table",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minivllm.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
