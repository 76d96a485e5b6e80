"""Above the chapters: asked inside a kernel after a cell failed: which of the reader's lines did it pass?"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from typing import Any

MIME = "application/vnd.minivllm.places+json"
SOURCE = (
    f"__import__({__name__!r}, fromlist=['publish']).publish()"  # uses no name that a reader may have taken
)


def publish() -> None:
    """Send the places of the last error, outermost first, to whoever runs this kernel."""
    from IPython.display import display

    display({MIME: places(getattr(sys, "last_value", None), os.getcwd())}, raw=True)


def places(error: BaseException | None, folder: str) -> list[dict[str, Any]]:
    """Where an error passed through cells, or through files in this folder.

    A place has `line`, `text` (that line), `source` (a cell's whole text) or `file` (a file's name). An error
    in a cell's syntax has one place, without source: it stands in the cell that was to be run.
    """
    found = []
    for frame, line in traceback.walk_tb(error.__traceback__ if error is not None else None):
        name = frame.f_code.co_filename
        lines = linecache.getlines(name)
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        if lines and not os.path.exists(name) and not name.startswith("<"):
            found.append({"line": line, "text": text, "source": "".join(lines), "file": None})
        elif os.path.dirname(os.path.abspath(name)) == folder:
            found.append({"line": line, "text": text, "source": None, "file": os.path.basename(name)})
    if not found and isinstance(error, SyntaxError):
        found.append(
            {"line": error.lineno or 1, "text": (error.text or "").strip(), "source": None, "file": None}
        )
    return found[-50:]  # a recursion without end has thousands
