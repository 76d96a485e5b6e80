"""Stands in for a CUDA graph where there is no GPU: a tape of operations on tensors that stay where they are.

As with a graph, what was recorded is repeated with the same addresses, whatever Python would do now, and a
recorded run must not ask for a value: that would freeze it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Tape(TorchDispatchMode):
    """Keeps each operation with its arguments and its result."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in READS, f"{func} reads a value on the host"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def launch(self, kernel, grid, args, kwargs):
        """Run a Triton kernel in the interpreter, whose own use of tensors is no part of the tape."""

        def run(*args, **kwargs):
            with _disable_current_modes():
                kernel[grid](*args, **kwargs)

        run(*args, **kwargs)
        self.calls.append((run, args, kwargs, None))

    def replay(self) -> None:
        for func, args, kwargs, kept in self.calls:
            result = func(*args, **kwargs)
            if isinstance(kept, torch.Tensor) and result is not kept:
                kept.copy_(result)


class Recorder:
    """Records runs on tapes. kernels: (module, name) of the Triton kernels that a run may start."""

    def __init__(self, monkeypatch, kernels=()):
        self.tapes: list[Tape] = []
        self.recording: Tape | None = None
        self.num_replays = 0
        for module, name in kernels:
            monkeypatch.setattr(module, name, TapedKernel(self, getattr(module, name)))

    def __call__(self, run):
        run()  # warm-up, as for a graph
        tape = Tape()
        with tape:
            self.recording = tape
            run()
            self.recording = None
        self.tapes.append(tape)

        def replay():
            self.num_replays += 1
            tape.replay()

        return replay


class TapedKernel:
    """A Triton kernel whose launches go on the tape while there is one."""

    def __init__(self, recorder: Recorder, kernel):
        self.recorder, self.kernel = recorder, kernel

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            if self.recorder.recording is None:
                self.kernel[grid](*args, **kwargs)
            else:
                self.recorder.recording.launch(self.kernel, grid, args, kwargs)

        return launch
