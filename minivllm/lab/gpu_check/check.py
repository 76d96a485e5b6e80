"""Above the chapters: runs the parts of the check one after another and writes what is known after each.

A part is a module with `shares(here)`, what each of its processes is given, and `run(share)`, which yields
(name, row): the name of a list of results, and one more row for it. A row with "ok": False is a wrong result.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.lab.gpu_check.here import Here, Row, look_around
from minivllm.lab.gpu_check.processes import Lost, in_processes
from minivllm.lab.workload import write_whole

FULL, MINIATURE = "gpu_check.json", "miniature.json"
OVERTIME = 1.5  # times its allowance: then a part is stopped
FOR_LOOKING = 60.0  # seconds
TO_END = 10.0  # seconds before it is stopped, in which a part that looks at the clock ends by itself
DIGITS = 5


@dataclass(frozen=True)
class Part:
    """seconds: its allowance. triton: whether it needs Triton's kernels, in part at least."""

    seconds: float
    triton: bool = True

    def module(self, name: str) -> Any:
        """The module that has it."""
        return import_module(f"minivllm.lab.gpu_check.part_{name}")


PARTS = {
    "kernels": Part(75),
    "agreement": Part(45),
    "decode": Part(60),
    "prefill": Part(40),
    "copy": Part(25),
    "engine": Part(150),
    "notebooks": Part(80, triton=False),
    "tuning": Part(60),
}


def run_check(names: Sequence[str], folder: Path, minutes: float, log: Callable[[str], None]) -> Row:
    """Run these parts and write their results; returns what was written.

    folder: where the files go. minutes: for all; a part that would start later is skipped, and one that
    still runs then is stopped. log: called with a line for each thing that happens.

    Raises OSError where the folder cannot be written, and MinivllmError where there is no telling what this
    machine is.
    """
    begin = time.monotonic()
    ends = begin + 60 * minutes
    for found in in_processes(lambda share: [look_around()], [None], FOR_LOOKING):
        if isinstance(found, Lost):
            raise MinivllmError(f"PyTorch cannot say what this machine is: {found.why}.")
        here, about = found
    parts: dict[str, Row] = {}
    result: Row = {**about, "minutes": minutes, "parts": parts}
    write_results(result, folder)  # where that cannot be, now is the time to say so
    log(f"{about['device']}, {about['versions']}")
    for name in names:
        if time.monotonic() >= ends:
            parts[name] = {"status": "skipped", "seconds": 0.0, "error": f"after {minutes:g} minutes"}
            log(f"{name}: skipped")
        else:
            log(f"{name}: begins, allowance {PARTS[name].seconds:g} s")
            parts[name] = run_part(name, here, ends)
            found = parts[name]
            log(f"{name}: {found['status']} after {found['seconds']:.0f} s {found.get('error', '')}".strip())
        result["seconds"] = time.monotonic() - begin
        write_results(result, folder)
    return result


def run_part(name: str, here: Here, ends: float) -> Row:
    """Run one part until then at most: {"status": "done" | "failed", "seconds", "error", "results"}."""
    part, begin = PARTS[name], time.monotonic()
    results: dict[str, list[Row]] = {}
    if part.triton:
        for list_name, row in here.left_out():
            results.setdefault(list_name, []).append(row)
    faults: list[str] = []
    try:
        module = part.module(name)
        shares = module.shares(replace(here, ends=min(ends - TO_END, begin + part.seconds)))
        most = OVERTIME * part.seconds if here.gpu else math.inf  # the interpreter takes what it takes
        for item in in_processes(module.run, shares, min(most, ends - begin)):
            if isinstance(item, Lost):
                faults.append(item.why)
            else:
                results.setdefault(item[0], []).append(item[1])
    except Exception as error:
        faults.append(f"{type(error).__name__}: {error}")
    rows = [(list_name, row) for list_name, rows in results.items() for row in rows if "ok" in row]
    wrong = [(list_name, row) for list_name, row in rows if not row["ok"]]
    if wrong:
        faults.append(
            f"{len(wrong)} of {len(rows)} results are wrong, the first: {wrong[0][0]} {wrong[0][1]}"
        )
    found: Row = {"status": "failed" if faults else "done", "seconds": time.monotonic() - begin}
    return found | ({"error": "; ".join(faults)} if faults else {}) | {"results": results}


def write_results(result: Row, folder: Path) -> None:
    """Write all that is known so far; of a GPU's results also a file for each notebook, as it reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / (MINIATURE if result["miniature"] else FULL), as_text(result))
    if not result["miniature"]:
        top = {key: value for key, value in result.items() if isinstance(value, str)}
        notebooks = result["parts"].get("notebooks", {}).get("results", {})
        for name, rows in notebooks.items():
            write_whole(folder / f"{name}.json", as_text(top | {row["what"]: row["value"] for row in rows}))


def as_text(result: Any) -> str:
    """JSON with a row on each line, five digits of a number, and null for one that is none."""
    return _lines(_plain(result), "") + "\n"


def _lines(value: Any, indent: str) -> str:
    deeper = indent + "  "
    if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
        inside = [f"{deeper}{json.dumps(key)}: {_lines(v, deeper)}" for key, v in value.items()]
        return "{\n" + ",\n".join(inside) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        return "[\n" + ",\n".join(deeper + _lines(v, deeper) for v in value) + f"\n{indent}]"
    return json.dumps(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
