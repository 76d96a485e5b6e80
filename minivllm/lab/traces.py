"""Above the chapters: traces of real services: when requests came, and how long they were.

Two public formats are read. Neither holds any text:

    Azure      CSV         TIMESTAMP,ContextTokens,GeneratedTokens
                           2023-11-16 18:17:03.9799600,4808,10
    Mooncake   JSON lines  {"timestamp": 27, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]}

Mooncake counts milliseconds, and names each block of 512 prompt tokens, and what is left at the prompt's
end, by a hash id; prompts whose ids begin alike begin alike. `lab/replay.py` makes prompts of that.
"""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from os import PathLike
from pathlib import Path
from typing import Any

from minivllm.errors import InvalidRequestFile
from minivllm.lab.request_file import (
    BadLine,
    decode,
    expect,
    is_int,
    is_number,
    parse_lines,
    parse_object,
    refuse_line,
)
from minivllm.lab.workload import LAST_ARRIVAL

BLOCK = 512  # tokens that one hash id of Mooncake stands for
MOST_TOKENS = 10_000_000  # in one prompt or output: more than any model takes
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace: when, in microseconds on the trace's own clock; tokens in and out, 0 too; and
    the ids of its prompt's blocks, None where the trace has none."""

    microseconds: float
    num_in: int
    num_out: int
    hash_ids: tuple[int, ...] | None = None


def recognise(path: str | PathLike[str], data: bytes) -> str:
    """The format of a file's contents, by its first line that is not empty: "azure", "mooncake", or else
    "minivllm". A name in .csv is Azure's, unless JSON stands there."""
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    first = next((line.strip() for line in lines if line.strip()), b"")
    if first.startswith(b"{"):
        return "mooncake" if any(f'"{key}"'.encode() in first for key in _MOONCAKE) else "minivllm"
    azure = any(name.encode() in first for name in _AZURE) or Path(path).suffix.lower() == ".csv"
    return "azure" if azure else "minivllm"


def parse_trace(path: str | PathLike[str], data: bytes, format: str) -> list[TraceRow]:
    """The requests in the contents of a trace, "azure" or "mooncake", by arrival; of equal times, the first
    in the file first. Empty lines are passed over, and columns and keys that are not needed.

    Raises InvalidRequestFile, which names the file, the line, what is wrong and what was expected.
    """
    if format == "azure":
        rows = _azure_rows(path, data)
    else:
        rows = parse_lines(path, data.removeprefix(codecs.BOM_UTF8), _mooncake_row, ", ".join(_MOONCAKE))
    rows.sort(key=lambda row: row.microseconds)
    if rows[-1].microseconds - rows[0].microseconds > LAST_ARRIVAL * 1e6:
        raise InvalidRequestFile(
            f"{os.fspath(path)}: its times are more than 30 years apart; expected fewer."
        )
    return rows


def _azure_rows(path: str | PathLike[str], data: bytes) -> list[TraceRow]:
    lines: list[str] = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True), 1):
        try:
            lines.append(decode(line))
        except BadLine as error:
            raise refuse_line(path, number, error) from error
    reader = csv.reader(lines, strict=True)
    rows, header = [], None
    try:
        for fields in reader:
            if len(fields) < 2 and not "".join(fields).strip():
                continue
            if header is None:
                header = [name.strip() for name in fields]
                missing = [name for name in _AZURE if name not in header]
                if missing:
                    raise BadLine(f"no column {', '.join(missing)}; expected the columns {','.join(_AZURE)}.")
            else:
                rows.append(_azure_row(header, fields))
    except (csv.Error, BadLine) as error:
        what = error if isinstance(error, BadLine) else f"not CSV ({error}); expected {','.join(_AZURE)}."
        raise refuse_line(path, reader.line_num, what) from error
    if not rows:
        raise InvalidRequestFile(
            f"{os.fspath(path)} holds no request; expected a line for each, below {','.join(_AZURE)}."
        )
    return rows


def _azure_row(header: Sequence[str], fields: Sequence[str]) -> TraceRow:
    if len(fields) != len(header):
        raise BadLine(f"{len(fields)} fields; expected {len(header)}, as in the first line.")
    time, num_in, num_out = (fields[header.index(name)].strip() for name in _AZURE)
    try:
        at = datetime.fromisoformat(time)
    except ValueError:
        expect(False, "TIMESTAMP", time, "a date and time such as 2023-11-16 18:17:03.9799600")
    for name, text in zip(_AZURE[1:], (num_in, num_out), strict=True):
        whole = text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MOST_TOKENS
        expect(whole, name, text, f"a whole number from 0 to {MOST_TOKENS}")
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return TraceRow((at - _EPOCH) // timedelta(microseconds=1), int(num_in), int(num_out))


def _mooncake_row(line: bytes) -> TraceRow:
    found = parse_object(line, _MOONCAKE)
    values: list[Any] = [found.get(key) for key in _MOONCAKE]
    time, num_in, num_out, ids = values
    right = is_number(time) and 0 <= time <= 1e15  # NaN is within nothing
    expect(right, "timestamp", time, "milliseconds from 0 on")
    for name, value in (("input_length", num_in), ("output_length", num_out)):
        right = is_int(value) and 0 <= value <= MOST_TOKENS
        expect(right, name, value, f"a whole number from 0 to {MOST_TOKENS}")
    expect(isinstance(ids, list) and all(map(is_int, ids)), "hash_ids", ids, "a list of whole numbers")
    blocks = -(-num_in // BLOCK)
    expect(len(ids) == blocks, "hash_ids", ids, f"{blocks} ids, one for every {BLOCK} of {num_in} tokens")
    return TraceRow(1000 * time, num_in, num_out, tuple(ids))
