"""Which chapter each module belongs to, and what it imports: read from the source, nothing is run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import minivllm

ROOT = Path(minivllm.__file__).parent
ABOVE = 99  # the engine's front, lab, course and command line stand above all chapters
FIRST_LINE = re.compile(r"(?:Chapter (\d+)|Above the chapters): .+[.?]", re.DOTALL)


def modules() -> dict[str, Path]:
    """Every module of the package, packages left out: their __init__ holds no code of a chapter."""
    paths = sorted(ROOT.rglob("*.py"))
    return {name_of(path): path for path in paths if path.name != "__init__.py" or path.parent.name == "cli"}


def name_of(path: Path) -> str:
    """minivllm/model/rope.py -> minivllm.model.rope."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def chapter_of(path: Path) -> int | None:
    """The chapter that a module's docstring names; None where it names none."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    match = FIRST_LINE.fullmatch(paragraph)
    return None if match is None else ABOVE if match[1] is None else int(match[1])


def chapters() -> dict[str, int]:
    """Module name -> chapter."""
    found = {name: chapter_of(path) for name, path in modules().items()}
    return {name: ABOVE if chapter is None else chapter for name, chapter in found.items()}


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a module imports: anywhere, also inside functions and for types alone."""
    known, found = set(modules()), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where a name comes from"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found & known
