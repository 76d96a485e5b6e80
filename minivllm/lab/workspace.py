"""Above the chapters: the memory that a step needs beside the pool: what its operations make and let go.

A CPU has no fixed memory to run out of, so the limit of a device is played here: an operation whose result
is larger than the limit is refused, with the error that PyTorch raises on a GPU. And what PyTorch takes from
a CPU's memory and gives back can be listed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Workspace(TorchDispatchMode):
    """Within a `with` block: `largest` is the size in bytes of the largest tensor that an operation made.

    limit: most bytes of one tensor; one that is larger raises torch.OutOfMemoryError. Views cost nothing.
    """

    def __init__(self, limit: int | None = None):
        super().__init__()
        self.limit, self.largest = limit, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        there = {_storage(value) for value in tree_leaves((args, kwargs)) if _has_storage(value)}
        for made in tree_leaves(result):
            if _has_storage(made) and _storage(made) not in there:
                size = made.untyped_storage().nbytes()
                if self.limit is not None and size > self.limit:
                    raise torch.OutOfMemoryError(
                        f"{size:,} bytes were asked for; the limit is {self.limit:,}."
                    )
                self.largest = max(self.largest, size)
        return result


def _has_storage(value: object) -> bool:
    """Whether it is a tensor whose numbers lie in memory of PyTorch's own; those of packed weights do not."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


class Allocations:
    """After a `with` block: `events`, in bytes, what PyTorch took of the CPU's memory (above 0) and gave back
    (below 0) within it, in this order. What was there before is not seen to go, nor what libraries below
    PyTorch and C kernels take for themselves."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    @property
    def taken(self) -> list[int]:
        """The sizes that were asked for, in order."""
        return [size for size in self.events if size > 0]

    @property
    def peak(self) -> int:
        """Most bytes that were there at once, of those taken within the block."""
        return max(accumulate(self.events, initial=0))

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        found = [event["args"] for event in events if event.get("name") == "[memory]"]
        on_cpu = [args for args in found if args["Device Type"] == 0]
        self.events = [args["Bytes"] for args in sorted(on_cpu, key=lambda args: args["Ev Idx"])]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
