"""Above the chapters: the results of a check as tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.lab import tables
from minivllm.lab.draw_results import NOT_MEASURED
from minivllm.lab.gpu_check.check import PARTS
from minivllm.lab.gpu_check.here import Row

MOST_ROWS = 40  # of a list that is shown whole
FORMS = dict.fromkeys(("error", "torch_error", "bound"), ".1e") | {"share_of_copy": ".3f"}
KIND = ("call", "kernels", "dtype")


def table(found: Mapping[str, Any] | None) -> str:
    """A check's JSON as text: what it ran on, then each part with its tables.

    None, and a part that is not there: "not measured yet".
    """
    if found is None:
        return f"On a GPU: {NOT_MEASURED}."
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    kind = "In miniature, so no time says anything: " if found["miniature"] else ""
    blocks = [f"{kind}{found['device']}, {found['date']}\n{versions}, commit {found.get('commit')}"]
    for name in PARTS:
        part = found["parts"].get(name)
        if part is None:
            blocks.append(f"{name}: {NOT_MEASURED}")
            continue
        blocks.append(f"{name}: {part['status']}, {part['seconds']:.0f} s")
        if part.get("error"):
            blocks[-1] += f"\n{part['error']}"
        for list_name, rows in part.get("results", {}).items():
            shown = rows if len(rows) <= MOST_ROWS else worst(rows)
            columns = {key: FORMS.get(key) for row in shown for key in row}
            blocks.append(f"{name}, {list_name}\n{tables.table(shown, columns)}")
    return "\n\n".join([*blocks, summary(found)])


def summary(found: Mapping[str, Any]) -> str:
    """How each part ended, and which targets were met."""
    status = {name: part["status"] for name, part in found["parts"].items()}
    text = "In short: " + (", ".join(f"{name} {ended}" for name, ended in status.items()) or NOT_MEASURED)
    targets = [row for part in found["parts"].values() for row in part.get("results", {}).get("targets", [])]
    if targets:
        text += "\n" + tables.table(targets, {key: ".3f" if key == "value" else None for key in targets[0]})
    return text


def worst(rows: list[Row]) -> list[Row]:
    """Of many rows with errors, for each call, kernels and dtype the one nearest to its bound, or beyond."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row.get(key) for key in KIND), []).append(row)
    found = []
    for many in kinds.values():
        wrong = [row for row in many if not row.get("ok", True)]
        nearest = wrong[0] if wrong else max(many, key=lambda row: _share(row))
        found.append({"cases": len(many), "wrong": len(wrong), **nearest})
    return found


def _share(row: Row) -> float:
    """The error as a share of its bound."""
    return row["error"] / row["bound"] if row.get("error") and row.get("bound") else 0.0
