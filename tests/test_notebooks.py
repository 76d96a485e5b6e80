"""The notebooks as they are stored: run in a stable form, and guarded against tests that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_output

from minivllm.course.build import build
from minivllm.course.guard import problems
from minivllm.course.notebook import notebook, parse
from minivllm.course.run import NotebookFailed, forbidden_names, png_of, run_notebooks, stable
from minivllm.errors import InvalidOption

ROOT = Path(__file__).parents[1]
STORED = sorted(ROOT.glob("notebooks/*.ipynb"))
BUILT = sorted([*ROOT.glob("solutions/*.ipynb"), *ROOT.glob("exercises/*.ipynb")])

SOURCE = """# %% [markdown]
# # A picture
# %%
# %matplotlib inline
from matplotlib.figure import Figure
# %% [compare sum]
print(1 + 1)
print(2 + 2)
# %% [figure line]
#| alt: A line that rises.
figure = Figure(figsize=(2, 1))
figure.subplots().plot([1, 2])
figure
# %% [widget]
import ipywidgets
ipywidgets.IntSlider(3)
"""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", STORED, ids=name_of)
def test_a_stored_notebook_has_the_cells_of_its_source(path):
    cells = nbformat.read(path, 4).cells
    source = notebook(parse(path.with_suffix(".py").read_text())).cells
    assert [(c.id, c.source, c.metadata) for c in cells] == [(c.id, c.source, c.metadata) for c in source], (
        "run make notebooks"
    )


@pytest.mark.parametrize("path", STORED, ids=name_of)
def test_the_figures_of_the_text_are_those_of_the_notebook(path):
    cells = {
        f"{path.stem}-{cell.metadata.minivllm.name}.png": png_of(cell)
        for cell in nbformat.read(path, 4).cells
        if cell.metadata.get("minivllm", {}).get("kind") == "figure"
    }
    assert cells
    figures = {p.name: p.read_bytes() for p in (ROOT / "book" / "figures").glob(f"{path.stem}-*.png")}
    assert figures == cells


@pytest.mark.parametrize("path", [*STORED, *BUILT], ids=name_of)
def test_nothing_in_a_notebook_is_a_test_only_in_appearance(path):
    assert list(problems(nbformat.read(path, 4))) == []


@pytest.mark.parametrize("path", STORED, ids=name_of)
def test_a_stored_notebook_tells_nothing_of_the_machine(path):
    text = path.read_text()
    for folder in ("/home/", "/root/", "/tmp/", "/Users/", "site-packages"):
        assert folder not in text
    assert len(text) < 1_500_000


def test_exercises_and_solutions_are_built_from_their_sources(tmp_path):
    (tmp_path / "solutions").mkdir()
    for source in ROOT.glob("solutions/ch*.py"):
        (tmp_path / "solutions" / source.name).write_text(source.read_text())
    made = {name_of(path): path.read_bytes() for path in build(tmp_path)}
    assert made == {name_of(path): path.read_bytes() for path in BUILT}, "run make exercises"


@pytest.mark.parametrize(
    "path", [p for p in BUILT if p.parent.name == "exercises"], ids=lambda path: path.stem
)
def test_an_exercise_fails_exactly_at_its_checks_as_it_ships(path):
    nb = nbformat.read(path, 4)
    NotebookClient(nb, timeout=120, allow_errors=True, resources={"metadata": {"path": str(ROOT)}}).execute()
    failed = [
        (cell.metadata.get("minivllm", {}), output.ename)
        for cell in nb.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    checks = [c.metadata.minivllm for c in nb.cells if c.metadata.get("minivllm", {}).get("kind") == "check"]
    assert checks
    assert failed == [(check, "ExerciseUnsolved") for check in checks]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "ch90_line.py").write_text(SOURCE)
    return tmp_path


def test_a_notebook_is_run_and_stored_the_same_each_time(root):
    [path] = run_notebooks(root)
    first = path.read_bytes()
    nb = nbformat.reads(first.decode(), 4)
    nbformat.validate(nb)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4]
    assert code[1].outputs == [new_output("stream", name="stdout", text="2\n4\n")]
    assert code[3].outputs == [], "a widget is blank on a page"
    assert "widgets" not in nb.metadata
    assert "execution" not in code[0].metadata
    figure = root / "book" / "figures" / "ch90_line-line.png"
    assert figure.read_bytes() == png_of(code[2])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert list(problems(nb)) == []
    stale = figure.with_name("ch90_line-old.png")
    stale.write_bytes(b"")
    assert list(run_notebooks(root, ["ch90_line"])) == [path]
    assert path.read_bytes() == first
    assert not stale.exists(), "the picture of a cell that is gone"
    with pytest.raises(InvalidOption, match=r"no notebook ch91; there are ch90_line"):
        list(run_notebooks(root, ["ch91"]))


@pytest.mark.parametrize(
    "cell, named",
    [
        ("import sys\nprint('careful', file=sys.stderr)", "stderr: 'careful'"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os\nprint(os.getcwd())", "shows the path"),
        ("print(object())", "address in memory"),
        ("import sys\nprint(sys.base_prefix)", "shows the path"),
        ("# %% [compare none]\nx = 1", "is to be compared, and shows nothing"),
        ("# %% [figure none]\n#| alt: x\n1", "shows 0 figures"),
    ],
    ids=["stderr", "fails", "path", "address", "base", "compare", "no figure"],
)
def test_what_must_not_be_stored_is_refused_by_its_cell_and_the_notebook_stays(root, cell, named):
    path = root / "notebooks" / "ch90_line.py"
    path.with_suffix(".ipynb").write_text("as it was")
    path.write_text(f"# %%\n{cell}\n")
    with pytest.raises(NotebookFailed, match=f"(?s)ch90_line.*{named}"):
        list(run_notebooks(root))
    assert path.with_suffix(".ipynb").read_text() == "as it was"


def test_the_folders_of_python_and_the_cache_and_the_name_of_the_machine_are_not_stored(monkeypatch):
    for name in ("prefix", "base_prefix", "exec_prefix"):
        monkeypatch.setattr(sys, name, f"/python/{name}")
    monkeypatch.setenv("MINIVLLM_HOME", "/cache/models")
    monkeypatch.setattr("socket.gethostname", lambda: "bench")
    shown = ["/python/prefix", "/python/base_prefix", "/python/exec_prefix", "/cache/models", "on bench:"]
    for text in shown:
        nb = notebook(parse("# %%\nx\n"))
        nb.cells[0].outputs = [new_output("stream", name="stdout", text=text)]
        with pytest.raises(NotebookFailed, match="shows"):
            stable(nb, "x", forbidden_names(ROOT))
    nb.cells[0].outputs = [new_output("stream", name="stdout", text="benchmark")]
    assert stable(nb, "x", forbidden_names(ROOT)).cells[0].outputs
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    assert "box" not in forbidden_names(ROOT)


def test_pieces_of_printed_text_are_joined_and_what_a_page_cannot_show_is_dropped():
    nb = notebook(parse("# %%\nx\n"))
    nb.cells[0].outputs = [
        new_output("stream", name="stdout", text="a"),
        new_output("stream", name="stdout", text="b"),
        new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "7"}}),
        new_output("execute_result", {"text/plain": "c", "text/html": "<script>"}, execution_count=9),
    ]
    nb.cells[0].execution_count = 9
    assert stable(nb, "x", ()).cells[0].outputs == [
        new_output("stream", name="stdout", text="ab"),
        new_output("execute_result", {"text/plain": "c"}, execution_count=1),
    ]


WIDGET = "application/vnd.jupyter.widget-view+json"


def good() -> Any:
    """A notebook with nothing wrong: compared, raising, and with a picture."""
    nb = notebook(parse("# %% [compare a]\nprint(1)\n# %%\n1 / 0\n# %% [figure b]\n#| alt: b\ndraw()\n"))
    compared, raising, figure = nb.cells
    compared.outputs = [new_output("stream", name="stdout", text="1\n")]
    raising.metadata["tags"] = ["raises-exception"]
    raising.outputs = [new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])]
    figure.outputs = [new_output("display_data", {"image/png": "", "text/plain": "<Figure>"})]
    for number, cell in enumerate(nb.cells, start=1):
        cell.execution_count = number
    return nb


def change(number: int, **changes: Any) -> Any:
    nb = good()
    nb.cells[number].update(changes)
    return nb


@pytest.mark.parametrize(
    "nb, named",
    [
        (change(0, outputs=[]), "none is stored"),
        (change(0, metadata={"tags": ["NBVAL-check-output"]}), "means nothing"),
        (change(0, metadata={"tags": ["nbval_check_output"]}), "means nothing"),
        (change(0, metadata={"tags": ["nbval-skip"]}), "switches it off"),
        (change(0, source="# NBVAL_CHECK_OUTPUT here\nprint(1)"), "looks like a marker"),
        (change(0, source="#nbval_check_output\nprint(1)"), "looks like a marker"),
        (change(0, source="%%capure\nprint(1)"), "magic"),
        (change(0, source="  !ls"), "magic"),
        (change(0, execution_count=7), "execution count"),
        (change(0, outputs=[new_output("stream", name="stderr", text="x")]), "stderr"),
        (change(1, outputs=[]), "no error is stored"),
        (change(1, metadata={}), "not marked as raising"),
        (change(2, metadata={}), "no text for those"),
        (change(0, source="print(1)  # NBVAL_CHECK_OUTPUT"), "looks like a marker"),
        (change(0, source="print(1)  # Nbval_check_output"), "looks like a marker"),
        (change(0, source="text = '''\n# NBVAL_SKIP\n'''"), "looks like a marker"),
        (change(0, source="x = 1\nx = !ls\nx"), "'x = !ls' is no Python; a magic"),
        (change(0, source="?print"), "'?print' is no Python"),
        (change(0, source="%matplotlib inline\nprint?"), "'print?' is no Python"),
        (change(0, source="x = %time f()"), "'x = %time f()' is no Python"),
        (change(0, source="%matplotlib widget"), "'%matplotlib widget' is no Python"),
        (change(0, source="'\ud800'"), "is no Python"),
        (change(0, metadata={"minivllm": {"kind": "compare"}}), "nothing compares it"),
        (change(0, metadata={"tags": "nbval-check-output"}), "no list"),
        (change(0, outputs=[new_output("display_data", {"text/html": "<b>"})]), "stores text/html"),
        (change(0, outputs=[new_output("display_data", {WIDGET: {}})]), f"stores {WIDGET}"),
        (change(2, outputs=[new_output("display_data", {"image/svg+xml": ""})]), "stores image/svg"),
        (change(2, outputs=[new_output("display_data", {"image/jpeg": ""})]), "stores image/jpeg"),
    ],
)
def test_the_guard_finds_what_nbval_lets_through(nb, named):
    assert list(problems(good())) == []
    found = list(problems(nb))
    assert len(found) == 1
    assert named in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "%matplotlib inline\nx = (7\n    % 4)",
        "'''\n%time f()\n!ls\n'''",
        "print('# NBVAL_CHECK_OUTPUT')",
        "await f()",
    ],
)
def test_the_guard_raises_no_false_alarm(source):
    assert list(problems(change(0, source=source))) == []


def test_make_test_runs_the_notebooks_cell_by_cell():
    dry = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True).stdout
    [line] = [line for line in dry.replace("\\\n", " ").splitlines() if "--nbval-lax" in line]
    for part in ("OMP_NUM_THREADS=1", "--dist loadfile", "--nbval-cell-timeout=", "notebooks solutions"):
        assert part in line


def test_a_notebook_is_valid_json_without_trailing_chance():
    for path in [*STORED, *BUILT]:
        assert json.loads(path.read_text())["nbformat"] == 4
