"""Above the chapters: the bytes of all tensors that an object holds, each memory counted once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def held_bytes(*roots: object, without: Sequence[object] = ()) -> int:
    """Bytes of the tensors that can be reached from these objects by attributes, lists and dictionaries.

    Memory that several tensors share, such as a tied embedding or a view, counts once, and as a whole.
    Looked into are this project's own objects and PyTorch's modules. without: objects that are not, nor what
    they hold. A tensor in oneDNN's order counts what its numbers take; what they are padded with is unknown.
    """
    sizes: dict[tuple[str, int], int] = {}
    seen: set[int] = set()
    for _ in _tensors(without, seen):
        pass  # they are seen now
    for tensor in _tensors(roots, seen):
        if tensor.is_mkldnn:
            sizes["packed", id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            sizes["storage", storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(roots: Sequence[object], seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached, none twice. seen: ids of what is not looked at."""
    left = list(roots)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, Mapping):
            left += thing.values()
        elif isinstance(thing, list | tuple | set):
            left += thing
        elif _is_ours(thing):
            left += vars(thing).values()


def _is_ours(thing: Any) -> bool:
    module = type(thing).__module__
    known = isinstance(thing, nn.Module) or module.split(".")[0] == "minivllm"
    return known and hasattr(thing, "__dict__")
