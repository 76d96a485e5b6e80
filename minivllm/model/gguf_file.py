"""Chapter 0: a GGUF file, read with nothing taken on trust.

GGUF is one file: a table of settings (the model's shape, its tokenizer), a table of tensors, then the
tensors, most of them quantised (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The `gguf`
package knows the quantisation formats. Its `GGUFReader` makes an object for each part of each string: 4.2 s
for the 98,052 strings of SmolLM2's tokenizer, against 0.14 s here (one core of an AMD EPYC, gguf 0.19.0,
2026-11-29). So the two tables are read here, every length checked against the file's size before it is
used, and a test holds the result to `GGUFReader`'s.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from minivllm.errors import InvalidModelFile

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
CHUNK = 4096  # blocks, of 32 numbers or more: what is made of them on the way stays in a core's cache


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table: shape in PyTorch's order, offset in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """The tables of one GGUF file, and its tensors on demand.

    metadata: key -> value, as in the file. tensors: name -> TensorInfo. header_digest: sha256 of all
    that stands before the tensors. Raises InvalidModelFile when the file is not GGUF, is cut short, or
    states a length that cannot be.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():  # a pipe would be waited for
            raise InvalidModelFile(f"{path} cannot be read as a GGUF file: it is no file.")
        try:
            with open(path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise InvalidModelFile(f"{path} cannot be read as a GGUF file: {error}.") from error
        self._at = 0
        if self._take(4) != b"GGUF":
            raise InvalidModelFile(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
        version = self._number("<I")
        if version not in (2, 3):
            raise InvalidModelFile(
                f"{path} is of GGUF version {version}; versions 2 and 3 (little-endian) can be read."
            )
        num_tensors, num_settings = self._number("<Q"), self._number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_settings):
            key = self._string()
            if key in self.metadata:
                raise self._damaged(f"the setting {key!r} stands twice")
            self.metadata[key] = self._value(self._number("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.header_digest = hashlib.sha256(self._bytes[: self._at]).hexdigest()
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {info.name: self._placed(info, start) for info in infos}
        if len(self.tensors) < len(infos):
            raise self._damaged("two tensors have the same name")

    def dequantize(self, name: str) -> np.ndarray:
        """The tensor as float32, in PyTorch's order. Raises InvalidModelFile where gguf cannot unpack it."""
        info = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[info.type]
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.offset).reshape(-1, block_bytes)
        numbers = np.empty((len(raw), block), np.float32)
        step = CHUNK if block > 1 else CHUNK * 32
        try:
            for i in range(0, len(raw), step):
                numbers[i : i + step].reshape(-1)[:] = dequantize(raw[i : i + step].reshape(-1), info.type)
        except NotImplementedError:
            raise InvalidModelFile(
                f"{self.path}: tensor {name!r} is stored as {info.type.name}, which cannot be unpacked. "
                "Take a file in another quantisation, for example Q4_K_M or Q8_0."
            ) from None
        return numbers.reshape(info.shape)

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        num_dims = self._number("<I")
        if not 1 <= num_dims <= 4:
            raise self._damaged(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dims))[::-1]
        type_id, offset = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise self._damaged(f"tensor {name!r} is of the unknown type {type_id}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self._damaged(
                f"tensor {name!r} of shape {shape} cannot be cut into {kind.name} blocks of {block}"
            )
        count = 1
        for size in shape:
            count *= size
        return TensorInfo(name, shape, kind, offset, count // block * block_bytes)

    def _placed(self, info: TensorInfo, start: int) -> TensorInfo:
        end = start + info.offset + info.num_bytes
        if end > len(self._bytes):
            raise self._damaged(
                f"tensor {info.name!r} ends at byte {end:,}, past the file's {len(self._bytes):,}"
            )
        return TensorInfo(info.name, info.shape, info.type, start + info.offset, info.num_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._scalar(kind))
        item_kind, length = self._number("<I"), self._number("<Q")
        if item_kind == _STRING:
            self._check_room(8 * length)  # each string has at least its own length
            return [self._string() for _ in range(length)]
        scalar = self._scalar(item_kind)
        raw = self._take(length * struct.calcsize(scalar))
        return np.frombuffer(raw, scalar).tolist()

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"a setting is of the unknown type {kind}")
        return _SCALARS[kind]

    def _number(self, scalar: str) -> Any:
        return struct.unpack(scalar, self._take(struct.calcsize(scalar)))[0]

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", errors="replace")

    def _take(self, count: int) -> bytes:
        self._check_room(count)
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _check_room(self, count: int) -> None:
        if self._at + count > len(self._bytes):
            raise self._damaged(f"{count:,} bytes are announced at byte {self._at:,} of {len(self._bytes):,}")

    def _damaged(self, what: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self.path} is damaged or cut short: {what}. Download or copy it again.")
