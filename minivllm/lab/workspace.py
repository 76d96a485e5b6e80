"""Above the chapters: the memory that a step needs beside the pool: what its operations make and let go.

A CPU has no fixed memory to run out of, so the limit of a device is played here: an operation whose result
is larger than the limit is refused, with the error that PyTorch raises on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
        there = {_storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and _storage(made) not in there:
                size = made.untyped_storage().nbytes()
                if self.limit is not None and size > self.limit:
                    raise torch.OutOfMemoryError(
                        f"{size:,} bytes were asked for; the limit is {self.limit:,}."
                    )
                self.largest = max(self.largest, size)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
