"""The chapters' text: its form, its links, the symbols it names, and that what it quotes is what runs."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pytest

from minivllm.course.interview import anchor
from minivllm.course.manifest import chapters
from minivllm.course.notebook import parse
from minivllm.course.sync import cell, code, filled, output, sync
from minivllm.errors import InvalidOption

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "book"
CHAPTERS = [BOOK / f"{chapter.name}.md" for chapter in chapters()]
PAGES = [*sorted(BOOK.glob("*.md")), ROOT / "README.md"]

SECTIONS = [
    "The problem, measured",
    "The idea",
    "The code",
    "Measure it",
    "Exercises",
    "Interview walkthrough",
    "How vLLM does it today",
    "Further reading",
]
LEDGER = ("must hold", "expect", "wins", "loses", "trap")
WALKTHROUGH = [
    "In 30 seconds",
    "Problem",
    "Design",
    "Benefit",
    "Boundary and cost",
    "The cell",
    "Follow-ups",
    "The common wrong answer",
]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def text_of(path: Path) -> str:
    """A page without its fences and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", path.read_text(encoding="utf-8")), flags=re.DOTALL)


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


@cache
def anchors(path: Path) -> set[str]:
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, 4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = text_of(path)
    return {anchor(LINK.sub(r"\2", title)) for _, title in HEADING.findall(text)}


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_a_chapter_has_all_its_files_and_names_its_exercises(chapter):
    for folder, ends in (
        ("notebooks", ("py", "ipynb")),
        ("solutions", ("py", "ipynb")),
        ("exercises", ("ipynb",)),
    ):
        for end in ends:
            assert (ROOT / folder / f"{chapter.name}.{end}").exists()
    text = text_of(BOOK / f"{chapter.name}.md")
    listed = section(text, "Exercises")
    for exercise in chapter.exercises:
        assert re.search(rf"\b{re.escape(exercise.id)}\b", listed)
        assert exercise.title in listed
    assert 4 <= len(chapter.exercises) <= 6
    assert f"minivllm course start {chapter.number}" in listed


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_its_parts_in_order_and_its_length(path):
    text = text_of(path)
    titles = [title for level, title in HEADING.findall(text) if level == "##"]
    assert titles == SECTIONS
    words = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split()
    assert 2000 <= len(words) <= 3800, len(words)
    tables = [line.lower() for line in section(text, "Measure it").splitlines() if line.startswith("|")]
    assert all(any(word in line for line in tables) for word in LEDGER), "the ledger"


@cache
def named_cells(stem: str) -> set[str]:
    source = (ROOT / "notebooks" / f"{stem}.py").read_text(encoding="utf-8")
    return {cell.name for cell in parse(source) if cell.name}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_walkthrough_is_whole(path):
    questions = section(text_of(path), "Interview walkthrough").split("\n### ")[1:]
    assert len(questions) >= 4
    claims = [q for q in questions if q.startswith("Claims, checked")]
    assert len(claims) == 1
    rows = [line for line in claims[0].splitlines() if line.startswith("|")][2:]
    assert rows
    for row in rows:
        assert re.search(r"\*\*(holds|wrong|depends|unsupported)", row), row
        cells = set(re.findall(r"`([a-z0-9-]+)`", row)) & named_cells(path.stem)
        assert cells or LINK.search(row), f"neither a cell nor a source: {row}"
    for question in questions:
        if question in claims:
            continue
        assert question.splitlines()[0].endswith("?")
        assert re.findall(r"^\*\*([^*]+?)\.?\*\*", question, re.MULTILINE)[: len(WALKTHROUGH)] == WALKTHROUGH
        cell = question.split("**The cell.**")[1].split("**Follow-ups.**")[0]
        assert "notebooks/" in cell


def links(path: Path) -> Iterator[tuple[str, str, str]]:
    yield from LINK.findall(text_of(path))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_link_leads_somewhere_and_every_picture_is_described(path):
    for picture, label, target in links(path):
        assert label.strip(), target
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        if fragment:
            assert fragment in anchors(file), target
        if picture:
            assert len(label) > 20, f"{target} shows more than {label!r}"


@cache
def names_of_the_package() -> set[str]:
    """Every name that the package defines, or uses as an attribute or an argument."""
    names = set(dir(builtins))
    for path in (ROOT / "minivllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.keyword) and node.arg:
                names.add(node.arg)
    return names


FILE = re.compile(r"(?:minivllm/)?[\w/.-]+\.(?:py|md|ipynb|toml|json)")
SYMBOL = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(\))?|[A-Za-z_]\w*\(\)|[A-Z]\w*[a-z]\w*[A-Z]\w*")
FOREIGN = ("torch.", "transformers", "vllm", "DynamicCache", "DynamicLayer", "StaticCache")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_symbol_and_file_that_a_chapter_names_exists(path):
    text = text_of(path).split("\n## How vLLM does it today\n")[0]
    for name in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        if name.startswith(FOREIGN):
            continue
        if FILE.fullmatch(name):
            assert any(base.joinpath(name).exists() for base in (ROOT, ROOT / "minivllm", BOOK)), name
        elif SYMBOL.fullmatch(name):
            for part in name.removesuffix("()").split("."):
                known = part in names_of_the_package() or part == "minivllm"
                assert known or (ROOT / "minivllm" / part).is_dir(), name


def test_the_chapters_quote_what_runs():
    for path, text in sync(ROOT):
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run make sync"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_python_in_a_chapter_is_the_packages_own_or_runs_as_it_stands(path):
    text = path.read_text(encoding="utf-8")
    for fence in re.finditer(
        r"^(?P<before>.*)\n```python\n(?P<code>.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        if not fence["before"].startswith(("<!-- code:", "<!-- cell:")):
            exec(compile(fence["code"], str(path), "exec"), {"__name__": "chapter"})


def test_pages_speak_of_the_project_alone():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for word in ("/root/", "/home/", "/tmp/", "pypi.org"):
            assert word not in text, f"{path.name}: {word}"


CODE = '''"""A module."""

LIMIT = 3
TABLE: dict[str, int] = {"a": 1}


class Pool:
    """A pool."""

    @property
    def size(self) -> int:
        """Its size."""
        return LIMIT

    def take(self):
        return 1
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "book").mkdir()
    (tmp_path / "pool.py").write_text(CODE)
    return tmp_path


def test_a_fence_is_filled_with_a_symbols_source(root):
    pool = root / "pool.py"
    assert code(pool, "Pool.size") == (
        '@property\ndef size(self) -> int:\n    """Its size."""\n    return LIMIT'
    )
    assert code(pool, "LIMIT") == "LIMIT = 3"
    assert code(pool, "TABLE").startswith("TABLE: dict")
    assert code(pool, "Pool").startswith('class Pool:\n    """A pool."""')
    old = "<!-- code: pool.py#Pool.take -->\n```python\nold\n\nolder\n```\n"
    text = f"Before\n{old}After\n```python\nkept\n```\n"
    new = filled(text, root, "x.md")
    assert new == (
        "Before\n<!-- code: pool.py#Pool.take -->\n```python\ndef take(self):\n    return 1\n```\nAfter\n"
        "```python\nkept\n```\n"
    )
    assert filled(new, root, "x.md") == new
    empty = "<!-- code: pool.py#LIMIT -->\n```python\n```\n"
    assert filled(empty, root, "x.md") == "<!-- code: pool.py#LIMIT -->\n```python\nLIMIT = 3\n```\n"


def test_a_fence_is_filled_with_what_a_cell_printed(root):
    from minivllm.course.run import run_notebooks

    (root / "notebooks").mkdir()
    (root / "notebooks" / "ch90_x.py").write_text(
        "# %% [compare sum]\nprint('a  ')\nprint(2)\n# %% [code no]\n1\n"
    )
    [path] = run_notebooks(root)
    assert output(path, "sum") == "[sum]\na\n2"
    assert cell(path, "sum") == "print('a  ')\nprint(2)"
    text = "<!-- output: notebooks/ch90_x.ipynb#sum -->\n```text\n```\n"
    (root / "book" / "x.md").write_text(text)
    assert dict(sync(root))[root / "book" / "x.md"] == text.replace("```text\n", "```text\n[sum]\na\n2\n")
    with pytest.raises(InvalidOption, match="the cell no of"):
        output(path, "no")
    with pytest.raises(InvalidOption, match="no cell summ; there are sum, no"):
        output(path, "summ")


@pytest.mark.parametrize(
    "mark, named",
    [
        ("<!-- code: pool.py#Pol -->\n```python\n```", r"line 3.*no Pol"),
        ("<!-- code: pool.py#Pool.siz -->\n```python\n```", r"no Pool\.siz"),
        ("<!-- code: pol.py#Pool -->\n```python\n```", r"line 3.*pol\.py"),
        ("<!-- code: pool.py#LIMIT -->\nno fence", r"line 3.*must be a fence"),
    ],
)
def test_a_mark_that_cannot_be_filled_is_refused_with_its_line(root, mark, named):
    with pytest.raises(InvalidOption, match=rf"(?s)x\.md, {named}" if named.startswith("line") else named):
        filled(f"# Title\n\n{mark}\n", root, "x.md")


def test_the_form_of_anchors_is_githubs():
    assert anchor("Kwon et al., 2023") == "kwon-et-al-2023"
    assert anchor("What the table costs") == "what-the-table-costs"
    assert anchor("`BlockPool.allocate`: all or nothing") == "blockpoolallocate-all-or-nothing"
