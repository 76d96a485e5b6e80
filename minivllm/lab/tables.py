"""Above the chapters: tables of plain text, the same on every machine and at every width of the screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

from minivllm.errors import InvalidOption

# How a column's values are written: a format specification such as ".1%" or "+,d", or a function; None:
# by their kind.
Form: TypeAlias = str | Callable[[Any], str] | None

NOTHING = "-"
MOST_DECIMALS = 6


def table(
    rows: Iterable[Mapping[str, object] | Sequence[object]],
    columns: Sequence[str] | Mapping[str, Form] | None = None,
) -> str:
    """Rows as lines of text under a head, numbers to the right, text to the left.

        scheme      slots  share
        ----------  -----  -----
        contiguous  1,024  20.4%
        paged          96  96.3%

    A row is a mapping, column -> value, or a sequence of values in the order of the columns. columns: which,
    in what order; with a mapping, also how: {"slots": None, "share": ".1%", "bytes": format_bytes}. Without
    it, mappings have the columns in the order in which they come, and sequences have no head.

    Unless told otherwise, whole numbers have separators between thousands, and the other numbers of a column
    as many decimals, up to six, as give the smallest three digits. None and a missing value are "-".

    Raises InvalidOption for rows of different lengths, keys that are no column, and forms that do not fit.
    """
    rows = list(rows)
    forms = _forms(rows, columns)
    cells = [_values(number, row, forms) for number, row in enumerate(rows, start=1)]
    num_columns = len(forms) if forms is not None else len(cells[0]) if cells else 0
    for number, values in enumerate(cells, start=1):
        if len(values) != num_columns:
            raise InvalidOption(
                f"Row {number} has {len(values)} values, and there are {num_columns} columns."
            )
    names = list(forms or {})
    how = list(forms.values()) if forms is not None else [None] * num_columns
    by_column = [[values[i] for values in cells] for i in range(num_columns)]
    texts = [
        _texts(column, form, names[i] if names else str(i + 1))
        for i, (column, form) in enumerate(zip(by_column, how, strict=True))
    ]
    right = [_is_of_numbers(column) for column in by_column]
    heads = [[name] for name in names] or [[] for _ in texts]
    widths = [max(map(len, [*head, *column]), default=0) for head, column in zip(heads, texts, strict=True)]
    lines = [names, ["-" * width for width in widths]] if names else []
    lines += [list(line) for line in zip(*texts, strict=True)]
    return "\n".join(_line(line, widths, right) for line in lines)


def _forms(rows: Sequence[Any], columns: Any) -> dict[str, Form] | None:
    """Column -> form, or None where the columns have no names."""
    if isinstance(columns, str):
        raise InvalidOption(f"columns={columns!r} is not possible: give a list of names, or name -> form.")
    if columns is not None:
        forms = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
        if not forms or len(forms) != len(columns) or not all(isinstance(name, str) for name in forms):
            raise InvalidOption(f"columns={columns!r} is not possible: give different names, one at least.")
        return forms
    if not rows:
        raise InvalidOption("A table needs a row, or the names of its columns.")
    if not any(isinstance(row, Mapping) for row in rows):
        return None
    return {str(key): None for row in rows if isinstance(row, Mapping) for key in row}


def _values(number: int, row: Any, forms: Mapping[str, Form] | None) -> list[Any]:
    if isinstance(row, Mapping) and forms is not None:
        unknown = [key for key in row if key not in forms]
        if unknown:
            raise InvalidOption(
                f"Row {number} has {unknown[0]!r}, which is no column; the columns are {', '.join(forms)}."
            )
        return [row.get(name) for name in forms]
    if isinstance(row, str | bytes) or not isinstance(row, Sequence):
        raise InvalidOption(f"Row {number} is {row!r}: it must be a mapping or a sequence of values.")
    return list(row)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_of_numbers(column: Sequence[object]) -> bool:
    known = [value for value in column if value is not None]
    return bool(known) and all(map(_is_number, known))


def _texts(column: Sequence[Any], form: Form, name: str) -> list[str]:
    decimals = _decimals([float(v) for v in column if _is_number(v) and not isinstance(v, Integral)])
    texts = []
    for value in column:
        if value is None:
            text = NOTHING
        elif callable(form):
            text = str(form(value))
        elif form is not None and not isinstance(value, str):
            try:
                text = format(value, form)
            except (TypeError, ValueError) as error:
                raise InvalidOption(f"Column {name!r}: {value!r} has no form {form!r}: {error}.") from error
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, Integral):
            text = f"{int(value):,}"
        elif isinstance(value, Real):
            text = f"{float(value):,.{decimals}f}"
        else:
            text = str(value)
        if "\n" in text:
            raise InvalidOption(f"Column {name!r} has a value of several lines: {value!r}.")
        texts.append(text)
    return texts


def _decimals(values: Iterable[float]) -> int:
    """Three digits for the smallest that is not 0."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if not sizes:
        return 1
    return min(MOST_DECIMALS, max(0, 2 - math.floor(math.log10(min(sizes)))))


def _line(texts: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        text.rjust(width) if to_the_right else text.ljust(width)
        for text, width, to_the_right in zip(texts, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()
