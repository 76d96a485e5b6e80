"""Above the chapters: a KV store under watch: what joining copies, and what it has in memory while it does.

The bytes are read off the operations that PyTorch really runs, not off a formula, and they are the same on
every device. What an allocator rounds up or keeps back is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch


class WatchedStore:
    """Another store, and counts of what `torch.cat` did in its `attend`.

    copied_bytes: what was copied out of the first of the tensors that are joined: the old keys and values.
    most_bytes: of all tensors that were joined on, or made by it, and were alive at one moment, the most.
    """

    def __init__(self, store: KVStore):
        self.store, self.keeps_kv = store, store.keeps_kv
        self._watch = _Watch()

    @property
    def copied_bytes(self) -> int:
        """Bytes, in all steps together."""
        return self._watch.copied_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes, at the fullest moment."""
        return self._watch.most_bytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """As the store's."""
        with self._watch:
            return self.store.attend(layer, q, k, v, batch)

    def free(self, seq_id: int) -> None:
        """As the store's."""
        self.store.free(seq_id)


class _Watch(TorchDispatchMode):
    """Sees every operation of the `with` block; its references are weak, so nothing lives longer."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes = self.most_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            old = args[0][0]
            self.copied_bytes += old.nbytes
            self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
            for storage in (old.untyped_storage(), out.untyped_storage()):
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.most_bytes = max(self.most_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return out
