"""`minivllm course`: a reader's notebooks run for real, hints, answers, questions, progress that is kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from click.testing import CliRunner, Result
from test_course import SOURCE

from minivllm.cli import main
from minivllm.cli.course_status import bar
from minivllm.course import manifest
from minivllm.course.answers import answer_source
from minivllm.course.build import build
from minivllm.course.clone import Clone, NoClone, chapter_numbered, find_clone
from minivllm.course.kernel import Failure, Kernel, Place
from minivllm.course.marking import Trouble, Unchecked, Verdict, explain, mark
from minivllm.course.progress import NewerProgress, Progress
from minivllm.course.quiz import Question, in_order, questions
from minivllm.course.work import CodeCell, DamagedNotebook, Step, plan, read_cells

ROOT = Path(__file__).resolve().parent.parent
# Chapter 3 with two of its exercises, whatever others there are.
CHAPTER = replace(chapter_numbered(3), exercises=(manifest.exercise("3.1"), manifest.exercise("3.2")))
SLOT, BLOCKS = (f"{e.id} {e.title}: " for e in CHAPTER.exercises)
TEXT = """# 3. Paging

## Interview walkthrough

### What does a `block table` map?

**In 30 seconds.** A sequence's [blocks](glossary.md#block) in the order
of its tokens.

It has one entry a block.

**Problem.** Not shown.

**The common wrong answer.** Tokens, one by one.

### Why equal blocks?

**In 30 seconds.** So that any block fits any request.

```text
### No question
```

**Follow-ups.** None.

### Claims, checked

| claim | verdict |

## How vLLM does it today

### Is this a question?

**In 30 seconds.** No.
"""
FIRST, SECOND = "What does a block table map?", "Why equal blocks?"


def course(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["course", *arguments], **options)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with exercises and a text for chapter 3 only, and the reader in it."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "minivllm"\n')
    for folder in ("solutions", "book"):
        (tmp_path / folder).mkdir()
    (tmp_path / "solutions" / f"{CHAPTER.name}.py").write_text(SOURCE)
    (tmp_path / "book" / f"{CHAPTER.name}.md").write_text(TEXT)
    list(build(tmp_path))
    others = [chapter for chapter in manifest.chapters() if chapter.number != 3]
    course = tuple(sorted([*others, CHAPTER], key=lambda chapter: chapter.number))
    for module in ("manifest", "clone"):
        monkeypatch.setattr(f"minivllm.course.{module}.chapters", lambda: course)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mine(root: Path) -> Path:
    """The reader's notebook, just begun."""
    assert course("start", "3").exit_code == 0
    return root / "my" / f"{CHAPTER.name}.ipynb"


def edit(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Change a notebook's cells as a reader would."""
    found = nbformat.read(path, 4)
    change(found.cells)
    nbformat.write(found, path)


def of(cells: Sequence[Any], kind: str, name: str) -> Any:
    """The cell of this kind and name."""
    return next(c for c in cells if c.metadata.get("minivllm") == {"kind": kind, "name": name})


def answer(path: Path, exercise_id: str, source: str | None = None) -> None:
    """Write an answer in the place of the stub, by default the right one."""
    name = manifest.exercise(exercise_id).answer.rsplit(".", 1)[1]
    text = source if source is not None else answer_source(manifest.exercise(exercise_id))

    def fill(cells: list[Any]) -> None:
        cell = of(cells, "exercise", exercise_id)
        before = cell.source.split(f"def {name}", 1)[0]
        indent = before.rsplit("\n", 1)[-1]
        cell.source = before + "\n".join(text.splitlines()).replace("\n", f"\n{indent}")

    edit(path, fill)


def progress(root: Path) -> dict[str, Any]:
    return json.loads((root / "my" / "progress.json").read_text())


# --- check: notebooks that run for real ---


def test_check_says_what_is_solved_and_what_the_mistake_is(mine, root):
    answer(mine, "3.1")
    answer(mine, "3.2", "def allocate(self, n):\n    return list(self._free)[:n]")
    before = mine.read_bytes()
    done = course("check", "3")
    assert done.exit_code == 1
    assert f"{SLOT}solved" in done.stdout
    assert f"{BLOCKS}not solved yet" in done.stdout
    assert "expected" in done.stdout
    assert "1 of 2 solved" in done.stdout
    assert "course hint 3.2" in done.stdout
    assert "Traceback" not in done.output
    assert mine.read_bytes() == before
    assert progress(root)["exercises"] == {
        "3.1": {"tries": 1, "solved": True},
        "3.2": {"tries": 1, "solved": False},
    }
    assert "1/2" in course("status").stdout


def test_one_exercise_is_checked_without_the_others_and_may_be_all_that_is_asked(mine, root):
    answer(mine, "3.1", "def slot_mapping(t, b, s, e):\n    pass\nwhile True:\n    pass")
    answer(mine, "3.2")
    done = course("check", "3.2")
    assert done.exit_code == 0, done.output
    assert "1 of 1 solved" in done.stdout
    assert progress(root)["exercises"] == {"3.2": {"tries": 1, "solved": True}}


def test_what_a_reader_may_do_to_a_notebook_costs_only_what_it_must(mine):
    def change(cells: list[Any]) -> None:
        cells.insert(2, nbformat.v4.new_code_cell("import os\ndie = lambda: os._exit(1)"))
        cells.insert(3, nbformat.v4.new_code_cell("\nhelp_me = undefined + 1"))
        of(cells, "check", "3.2").source = "# nothing"

    answer(mine, "3.1", "def slot_mapping(t, b, s, e):\n    die()")
    answer(mine, "3.2")
    edit(mine, change)
    done = course("check")
    assert done.exit_code == 1
    assert done.stdout.count("NameError: name 'undefined' is not defined") == 1
    assert "in line 2 of the cell that begins `help_me" in done.stdout
    assert f"{SLOT}not solved yet\n      Python itself ended, in its check" in done.stdout
    assert f"{BLOCKS}solved" in done.stdout, "a new kernel went on"
    assert "The check cell of 3.2 was changed" in done.stdout
    assert f"exercises{os.sep}{CHAPTER.name}.ipynb" in done.stdout


def test_a_cell_without_an_end_is_stopped(tmp_path):
    hangs = "while True:\n    print(1)"
    with Kernel(tmp_path, seconds=2) as kernel:
        failure = kernel.run(hangs)
    assert failure is not None
    assert failure.kind == "timeout"
    assert all(place.line in (1, 2) for place in failure.places)


class ScriptedKernel:
    """Stands for a kernel: a cell's text says how it fails. A new one has forgotten what ran in the last."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> ScriptedKernel:
        self.log.append("new")
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, source: str) -> Failure | None:
        self.log.append(source)
        kind = source.split()[0]
        return Failure(kind, "NameError") if kind in ("error", "died", "timeout") else None


def test_after_a_cell_that_hangs_or_kills_all_others_run_again_and_nothing_is_said_twice(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr("minivllm.course.marking.Kernel", lambda *_: ScriptedKernel(log))
    steps = [
        Step(CodeCell("import")),
        Step(CodeCell("error a")),
        Step(CodeCell("died b")),
        Step(CodeCell("answer", "exercise", "3.1")),
        Step(CodeCell("timeout", "check", "3.1")),
        Step(CodeCell("error c", "exercise", "3.2")),
        Step(CodeCell("check", "check", "3.2"), "changed.", "gone."),
        Step(CodeCell("right", "check", "3.3"), "changed.", "gone."),
        Step(CodeCell("after")),
    ]
    found = list(mark(steps, Path("my"), 9))
    first = ["new", "import", "error a", "died b"]
    second = ["new", "import", "error a", "answer", "timeout"]
    third = ["new", "import", "error a", "answer", "error c", "right"]
    assert log == [*first, *second, *third]
    assert [found[0], found[1]] == [one for one in found if isinstance(one, Trouble)]
    verdicts = [one for one in found if isinstance(one, Verdict)]
    assert [(v.exercise, v.solved) for v in verdicts] == [("3.1", False), ("3.3", True)]
    assert verdicts[1] == Verdict("3.3", True, remark="changed.")
    assert Unchecked("3.2") in found, "it may miss just the name that `error a` would have made"
    whole = [step for step in steps if not step.cell.source.startswith(("error a", "died b"))]
    assert [v.exercise for v in mark(whole, Path("my")) if isinstance(v, Verdict)] == ["3.1", "3.2", "3.3"]
    alone = [Step(CodeCell("error", "check", "3.1"), "changed.", "gone.")]
    assert [one.remark for one in mark(alone, Path("my")) if isinstance(one, Verdict)] == ["changed. gone."]


def test_an_error_in_the_answer_is_told_with_its_line(mine):
    answer(mine, "3.1", "def slot_mapping(t, b, s, e):\n    x = t[0]\n    return x.upper()")

    def break_off(cells: list[Any]) -> None:
        of(cells, "exercise", "3.2").source += "\nx = (1,\n"
        cells.remove(of(cells, "check", "3.1"))

    edit(mine, break_off)
    done = course("check", "3")
    assert done.exit_code == 1
    assert "AttributeError: 'int' object has no attribute 'upper'" in done.stdout
    assert (
        "in line 3 of the cell that begins `def slot_mapping(t, b, s, e):`: `return x.upper()`" in done.stdout
    )
    assert "The check cell of 3.1 is gone" in done.stdout
    assert "SyntaxError: '(' was never closed, in line" in done.stdout
    assert "of its cell: `x = (1,`" in done.stdout
    assert ".py, line" not in done.stdout, "the kernel's own file names tell a reader nothing"


def test_a_set_up_that_fails_takes_nothing_back(mine):
    progress = Progress(mine.parent)
    progress.tried("3.1", True)
    before = progress.exercise("3.1")

    def break_set_up(cells: list[Any]) -> None:
        next(cell for cell in cells if cell.cell_type == "code").source = "1 / 0"

    edit(mine, break_set_up)
    done = course("check", "3")
    assert done.exit_code == 1
    assert "ZeroDivisionError" in done.stdout
    assert "not checked: it needs a name from the cell that failed" in done.stdout
    assert progress.exercise("3.1") == before
    assert before["solved"]


def test_half_a_pair_of_surrogates_is_a_failure_of_its_cell_alone(mine):
    answer(mine, "3.1")
    text = json.loads(mine.read_text())
    cell = next(
        c for c in text["cells"] if c["metadata"].get("minivllm") == {"kind": "exercise", "name": "3.2"}
    )
    cell["source"] = ["\n", "y = 1\n", "x = '\ud800'"]
    text["cells"].insert(0, {"cell_type": "code", "source": "# \ud800", "metadata": {}})
    mine.write_text(json.dumps(text))
    done = course("check", "3")
    assert done.exit_code == 1
    assert f"{SLOT}solved" in done.stdout
    assert f"{BLOCKS}not solved yet\n      UnicodeEncodeError" in done.stdout
    assert "in line 3 of its cell: `x = '?'`" in done.stdout
    assert done.stdout.count("A cell of no exercise failed. UnicodeEncodeError") == 1


def test_nbval_runs_the_same_notebooks_under_the_repositorys_pytest_settings(mine, root):
    shutil.copy(ROOT / "pyproject.toml", root)
    answer(mine, "3.1")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "my/", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    cells = sum(cell.cell_type == "code" for cell in nbformat.read(mine, 4).cells)
    assert f"1 failed, {cells - 1} passed" in done.stdout
    assert "Exercise 3.2" in done.stdout


def environment(**more: str) -> dict[str, str]:
    """As now, with this package found from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def test_ctrl_c_ends_a_check_its_kernel_and_nothing_else(mine, root):
    sign = root / "runs"
    answer(mine, "3.1")
    answer(
        mine,
        "3.2",
        f"pass\nimport os, time\nopen({str(sign)!r}, 'w').write(str(os.getpid()))\ntime.sleep(99)",
    )
    code = "from minivllm.cli import main; main()"
    command = [sys.executable, "-c", code, "course", "check", "3"]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    while not (sign.exists() and sign.read_text()):
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 1
    assert f"{SLOT}solved" in out
    assert "Traceback" not in err
    assert "Task" not in err
    kernel = int(sign.read_text())
    for _ in range(100):
        if not alive(kernel):
            break
        time.sleep(0.1)
    assert not alive(kernel)
    assert progress(root)["exercises"] == {"3.1": {"tries": 1, "solved": True}}


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# --- check: without a kernel ---


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"cells": 3}', b'{"cells": [3]}', b'{"cells": [{"cell_type": "code", "source": 3}]}',
     b"\xff\xfe", b"<<<<<<< HEAD\n{}"],
    ids=["empty", "cut", "list", "no cells", "no cell", "no source", "bytes", "conflict"],
)  # fmt: skip
def test_a_file_that_is_no_notebook_any_more_is_said_with_the_way_out(mine, content):
    mine.write_bytes(content)
    done = course("check", "3")
    assert done.exit_code == 1
    assert "is no notebook any more" in done.stderr
    assert "minivllm course start 3" in done.stderr
    assert "Traceback" not in done.output
    assert mine.read_bytes() == content


def test_without_the_notebooks_that_are_handed_out_nothing_is_called_solved(mine, root):
    (root / "exercises" / mine.name).unlink()
    done = course("check", "3")
    assert done.exit_code == 1
    assert "git checkout" in done.stderr


def test_without_the_packages_of_the_lab_it_says_how_to_get_them(mine):
    code = "import sys\nsys.modules['nbclient'] = None\nfrom minivllm.cli import main\nmain()"
    command = [sys.executable, "-c", code, "course", "check", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    assert "make env" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_damaged_notebook_does_not_keep_the_others_from_being_checked(mine, monkeypatch):
    from minivllm.cli import course_check

    monkeypatch.setattr(course_check, "_chosen", lambda clone, which: [(CHAPTER, []), (CHAPTER, [])])
    mine.write_text("{")
    done = course("check")
    assert done.exit_code == 1
    assert done.stderr.count("is no notebook any more") == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["check"], "course start"),
        (["check", "3"], "course start 3"),
        (["check", "3.1"], "course start 3"),
        (["check", "99"], "no chapter 99"),
        (["check", "3.99"], "no exercise '3.99'"),
        (["check", "three"], "no exercise 'three'"),
        (["start", "99"], "no chapter 99"),
        (["hint", "3"], "no exercise '3'"),
        (["solution", "0.0"], "no exercise '0.0'"),
        (["solution", "3.1"], "course check 3.1"),
        (["quiz", "99"], "no chapter 99"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_is_not_there_is_one_line_that_says_what_to_do(root, arguments, named):
    done = course(*arguments)
    assert done.exit_code == 1
    assert named in done.stderr
    assert "Traceback" not in done.output
    assert len(done.stderr.splitlines()) == 1


def code(source: str) -> CodeCell:
    return CodeCell(source)


def test_the_plan_has_the_readers_cells_and_the_courses_checks_each_after_its_answer():
    def exercise(n: int, source: str = "answer") -> CodeCell:
        return CodeCell(source, "exercise", f"3.{n}")

    def check(n: int, source: str = "") -> CodeCell:
        return CodeCell(source or f"check {n}", "check", f"3.{n}")

    handed_out = [code("import"), exercise(1), check(1), exercise(2), check(2)]
    both = ["3.1", "3.2"]

    def planned(mine: list[CodeCell], wanted: list[str], whole: bool) -> list[str]:
        steps = plan(mine, handed_out, wanted, whole)
        return [
            step.cell.source + "?" * bool(step.remark) + "!" * bool(step.gone and step.cell.kind == "check")
            for step in steps
        ]

    assert planned(handed_out, both, True) == ["import", "answer", "check 1", "answer", "check 2"]
    assert planned(handed_out, ["3.2"], False) == ["import", "answer", "check 2"]
    spaced = [exercise(1), code("\ncheck 1  \n"), exercise(2), check(2, "")]
    assert planned(spaced, both, True) == ["answer", "check 1", "answer", "check 2"], "known by its text"
    moved = [check(2), check(1), exercise(1), exercise(2, "a"), exercise(2, "b"), code("z")]
    assert planned(moved, both, True) == ["answer", "check 1", "a", "b", "check 2", "z"]
    assert planned([check(1, "pass"), exercise(1)], ["3.1"], False) == ["answer", "check 1?"]
    assert planned([code("a"), check(1)], both, True) == ["a", "check 1!", "check 2?!"]
    assert planned([], both, True) == ["check 1?!", "check 2?!"]
    twice = [exercise(1), check(1), check(1, "pass")]
    assert planned(twice, ["3.1"], True) == ["answer", "check 1"]


def test_what_a_reader_is_told_of_an_error_is_short_and_points_to_a_line_of_theirs():
    check = Step(CodeCell("course.check(...)", "check", "3.1"))
    at_check = Place(1, "course.check(...)", "course.check(...)\n")
    in_file = Place(7, "return 1 / 0", None, "helpers.py")
    said = explain(Failure("error", "ZeroDivisionError", "division by zero", (at_check, in_file)), check, 9)
    assert said == "ZeroDivisionError: division by zero, in line 7 of helpers.py: `return 1 / 0`."
    said = explain(Failure("error", "AssertionError", "", (at_check,)), check, 9)
    assert said == "AssertionError, in line 1 of its check: `course.check(...)`."
    assert explain(Failure("error", "CheckFailed", "expected 1", (at_check,)), check, 9) == "expected 1"
    stub = Failure("error", "ExerciseUnsolved", "Exercise 3.1, Title, is not solved yet. A first hint: look.")
    assert explain(stub, check, 9) == "A first hint: look."
    another = replace(stub, message=stub.message.replace("3.1", "3.2"))
    assert explain(another, check, 9) == another.message
    assert len(explain(Failure("error", "ValueError", "x" * 9000 + "\ny"), check, 9)) < 400
    assert len(explain(Failure("error", "CheckFailed", "x" * 9000), check, 9)) <= 1500
    assert "--limit" in explain(Failure("timeout"), check, 9)


# --- start ---


def test_start_copies_the_exercises_once_and_never_onto_a_readers_work(root):
    done = course("start")
    mine, handed_out = root / "my" / f"{CHAPTER.name}.ipynb", root / "exercises" / f"{CHAPTER.name}.ipynb"
    assert mine.read_bytes() == handed_out.read_bytes()
    assert f"my{os.sep}{mine.name}" in done.stdout
    for words in ("make lab", f"jupyter lab my{os.sep}{mine.name}", "minivllm course check 3"):
        assert words in done.stdout
    mine.write_text("my work")
    again = course("start", "3")
    assert again.exit_code == 0
    assert "there already" in again.stdout
    assert "0 of 2 exercises solved" in again.stdout
    assert mine.read_text() == "my work"
    assert course("start").exit_code == 0
    assert "started every chapter" in course("start").stdout
    mine.unlink()
    mine.symlink_to(root / "nowhere")
    assert course("start", "3").exit_code == 1
    assert not (root / "nowhere").exists()


@pytest.mark.parametrize(
    "put",
    [lambda path: path.symlink_to("nowhere"), os.mkfifo, Path.mkdir],
    ids=["broken link", "fifo", "folder"],
)
@pytest.mark.parametrize(
    "command", [["start", "3"], ["check", "3"], ["check", "3.1"], ["check"]], ids=" ".join
)
def test_what_is_no_file_in_the_place_of_a_notebook_is_said_in_a_line(root, put, command):
    (root / "my").mkdir()
    put(root / "my" / f"{CHAPTER.name}.ipynb")
    done = course(*command)
    assert done.exit_code == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert f"{CHAPTER.name}.ipynb is no file" in line
    assert "Move it away" in line


def test_start_says_where_there_is_nothing_to_start(root):
    shutil.rmtree(root / "exercises")
    (root / "exercises").mkdir()
    assert "no exercises" in course("start").stderr
    assert "no exercises for chapter 3" in course("start", "3").stderr
    assert not (root / "my").exists()
    assert "no exercises" in course("status").stdout


def test_a_file_called_my_is_no_place_for_work(root):
    (root / "my").write_text("")
    for command in (["start"], ["hint", "3.1"], ["quiz"]):
        done = course(*command)
        assert (done.exit_code, "Move it away" in done.stderr) == (1, True)
    assert course("status").exit_code == 0


def test_the_clone_is_found_from_below_else_by_the_package_and_else_it_is_said(root, tmp_path, monkeypatch):
    (root / "book" / "deep").mkdir()
    monkeypatch.chdir(root / "book" / "deep")
    assert find_clone() == Clone(root)
    monkeypatch.chdir("/")
    assert find_clone() == Clone(ROOT)
    monkeypatch.setattr("minivllm.__file__", "/site-packages/minivllm/__init__.py")
    with pytest.raises(NoClone, match="Clone the project"):
        find_clone()
    for command in (["status"], ["start"], ["check"], ["hint", "3.1"], ["solution", "3.1"], ["quiz"]):
        assert "Clone the project" in course(*command).stderr
    (root / "pyproject.toml").write_text('[project]\nname = "another"')
    monkeypatch.chdir(root)
    with pytest.raises(NoClone):
        find_clone()


# --- status ---


def test_status_alone_shows_every_chapter_and_writes_nothing(root):
    done = course()
    assert done.exit_code == 0
    assert done.stdout == course("status").stdout
    for chapter in manifest.chapters():
        assert f" {chapter.number} " in done.stdout
        assert chapter.title.split()[0] in done.stdout
        assert str(chapter.minutes) in done.stdout
        assert f"0/{len(chapter.exercises)}" in done.stdout
    assert "0/2" in done.stdout
    assert "course start 3" in done.stdout
    assert not (root / "my").exists()


def test_status_says_what_to_do_next(mine, root):
    file = Progress(root / "my")
    assert "exercise 3.1" in course("status").stdout
    file.tried("3.1", True)
    assert "exercise 3.2" in course("status").stdout
    file.tried("3.2", True)
    assert "minivllm course quiz 3" in course("status").stdout
    for question in (FIRST, SECOND):
        file.answered(3, question, True)
    assert "solved and known all" in course("status").stdout
    file.tried("3.1", False)
    assert "exercise 3.1" in course("status").stdout, "the last check counts"


def test_a_bar_is_empty_only_at_nothing_and_full_only_at_all():
    assert [bar(n, 100, "#.") for n in (0, 1, 50, 99, 100)] == [
        "...... 0/100",
        "#..... 1/100",
        "###... 50/100",
        "#####. 99/100",
        "###### 100/100",
    ]
    assert bar(0, 0) == "-"


def test_status_hints_and_questions_need_no_torch(mine):
    code = "import sys\nfrom minivllm.cli import main\ntry: main()\nfinally: print(*sorted(sys.modules))"
    for arguments in (["status"], ["start", "3"], ["hint", "3.1"], ["quiz", "3"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "course", *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment(PYTHONIOENCODING="ascii"),
        )
        assert done.returncode == 0, done.stderr
        modules = set(done.stdout.splitlines()[-1].split())
        assert "click" in modules
        assert not {"torch", "numpy", "nbclient", "transformers"} & modules
        assert "?" not in done.stdout.split("Next:")[0] or arguments[0] != "status", "bars in plain ASCII"


# --- hint, solution ---


def test_hints_come_one_by_one_and_are_remembered(root):
    hints = manifest.exercise("3.2").hints
    for seen in range(3):
        said = course("hint", "3.2").stdout
        assert [text in said for text in hints] == [i <= seen for i in range(3)]
        assert ("course solution 3.2" in said) == (seen == 2)
    said = course("hint", "3.2").stdout
    assert all(text in said for text in hints)
    assert "course solution 3.2" in said
    assert progress(root)["exercises"]["3.2"]["hints"] == 3


def test_the_solution_is_shown_after_a_try_or_when_it_is_insisted_on(root):
    e = manifest.exercise("3.2")
    refused = course("solution", "3.2")
    assert refused.exit_code == 1
    assert "--yes" in refused.stderr
    assert "def allocate" not in refused.output
    shown = course("solution", "3.2", "--yes").stdout
    (root / "my").mkdir()
    Progress(root / "my").tried("3.2", False)
    assert course("solution", "3.2").stdout == shown
    assert answer_source(e) in shown
    assert e.answer in shown
    path, lines = next(line for line in shown.splitlines() if "blocks.py" in line).split(", lines ")
    first = int(lines.split()[0])
    assert "def allocate" in Path(path).read_text().splitlines()[first - 1]


# --- quiz ---


def test_questions_are_read_from_the_walkthrough_and_from_nothing_else():
    found = questions(TEXT, 3)
    assert [q.text for q in found] == [FIRST, SECOND]
    assert found[0].answer == "A sequence's blocks in the order\nof its tokens.\n\nIt has one entry a block."
    assert found[0].wrong == "Tokens, one by one."
    assert found[1].answer.startswith("So that any block fits")
    assert "### No question" in found[1].answer
    assert found[1].wrong == ""
    assert questions("# 1. No walkthrough\n### Why?\n**In 30 seconds.** So.", 1) == []


def test_every_chapters_text_has_questions_with_an_answer_and_a_common_wrong_one():
    for path in sorted((ROOT / "book").glob("ch*.md")):
        found = questions(path.read_text(), int(path.stem[2:4]))
        assert found, path.name
        for question in found:
            assert question.answer, question
            assert question.wrong, question


def test_what_was_not_known_comes_first_the_next_time(root):
    done = course("quiz", "3", input="\ny\n\nmaybe\nn\n")
    assert done.exit_code == 0
    order = [done.stdout.index(text) for text in (FIRST, "one entry a block", "Tokens, one by one", SECOND)]
    assert order == sorted(order)
    assert "y for yes" in done.stdout
    assert "2 of 2 asked, 1 known" in done.stdout
    assert "Not shown" not in done.stdout
    again = course("quiz", input="\nyes\nq\n")
    assert again.exit_code == 0
    assert again.stdout.index(SECOND) < again.stdout.index(FIRST)
    assert "1 of 2 asked, 1 known" in again.stdout
    assert progress(root)["quiz"] == {
        "3": {FIRST: {"asked": 1, "known": True}, SECOND: {"asked": 2, "known": True}}
    }
    assert "2/2" in course("status").stdout


def test_questions_known_least_often_come_before_the_others_that_were_known():
    a, b, c, d = (Question(3, name, "", "") for name in "abcd")
    noted = {"3": {"a": {"known": True, "asked": 3}, "b": {"known": True, "asked": 1}, "d": {"known": False}}}
    assert in_order([a, b, c, d], noted) == [d, c, b, a]


@pytest.mark.parametrize("given", ["", "q\n", "\nq\n", "\n", "\nx\n", "\x00\xff\n"], ids=range(6))
def test_a_quiz_ends_cleanly_wherever_the_input_ends(root, given):
    done = course("quiz", input=given.encode("latin-1"))
    assert done.exit_code == 0
    assert "0 of 2 asked" in done.stdout
    assert "Traceback" not in done.output


class Interrupted:
    """An input whose reader presses Ctrl-C at the third prompt."""

    def __init__(self) -> None:
        self.given = ["\n", "y\n"]

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        if not self.given:
            raise KeyboardInterrupt
        return self.given.pop(0)


def test_ctrl_c_ends_a_quiz_and_what_was_answered_is_kept(root, monkeypatch):
    from minivllm.cli import course_quiz

    stdin = Interrupted()
    monkeypatch.setattr(course_quiz, "sys", type("Sys", (), {"stdin": stdin}))
    done = course("quiz")
    assert done.exit_code == 0
    assert "1 of 2 asked, 1 known" in done.stdout
    assert progress(root)["quiz"] == {"3": {FIRST: {"asked": 1, "known": True}}}


def test_without_questions_the_quiz_says_so(root):
    (root / "book" / f"{CHAPTER.name}.md").unlink()
    for command in (["quiz"], ["quiz", "3"]):
        done = course(*command)
        assert (done.exit_code, "no questions" in done.stderr) == (1, True)


# --- progress ---


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"version": "1"}', b'{"version": 0}', b'{"version": 1, "exercises": []}',
     b'{"version": 1, "exercises": {"3.1": {"tries": -1}}}',
     b'{"version": 1, "quiz": {"3": {"?": {"known": 1}}}}',
     b'{"version": 1, "quiz": 3}', b"\xff", b"[" * 100_000],
    ids=range(12),
)  # fmt: skip
def test_a_damaged_file_is_set_aside_and_said_and_nothing_is_lost(root, content):
    my = root / "my"
    my.mkdir()
    (my / "progress.damaged-1.json").write_text("older")
    (my / "progress.json").write_bytes(content)
    done = course("status")
    assert done.exit_code == 0
    assert "progress.damaged-2.json" in done.stderr
    assert (my / "progress.damaged-2.json").read_bytes() == content
    assert (my / "progress.damaged-1.json").read_text() == "older"
    course("hint", "3.1")
    assert progress(root)["exercises"] == {"3.1": {"hints": 1}}


def test_what_a_later_version_wrote_is_kept_or_refused(tmp_path):
    file = Progress(tmp_path)
    kept = {
        "version": 1,
        "later": [1],
        "exercises": {"3.1": {"tries": 2, "stars": 5}, "9.9": {}},
        "quiz": {"9": {"Why?": {"mood": "\ud800"}}},
    }
    file.path.write_text(json.dumps(kept))
    file.tried("3.1", True)
    kept["exercises"]["3.1"] |= {"tries": 3, "solved": True}  # type: ignore[index]
    assert json.loads(file.path.read_text()) == kept
    newer = '{"version": 2, "exercises": []}'
    file.path.write_text(newer)
    for call in (file.read, lambda: file.tried("3.1", True)):
        with pytest.raises(NewerProgress, match="version 2"):
            call()
    assert file.path.read_text() == newer


def test_a_change_that_fails_changes_nothing(tmp_path):
    file = Progress(tmp_path)
    file.tried("3.1", True)
    before = file.path.read_bytes()

    def fail() -> None:
        with file.change() as found:
            found["exercises"].clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert file.path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [".progress.lock", "progress.json"]


def test_two_commands_at_once_lose_nothing_of_each_other(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom minivllm.course.progress import Progress\n"
        "for i in range(40): Progress(Path(sys.argv[1])).tried(f'{sys.argv[2]}.{i}', True)"
    )

    def write(name: str) -> int:
        command = [sys.executable, "-c", code, str(tmp_path), name]
        return subprocess.run(command, env=environment()).returncode

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(write, ["3", "4"])) == [0, 0]
    assert len(Progress(tmp_path).read()["exercises"]) == 80


def test_a_command_that_waits_in_vain_says_for_whom(tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr("minivllm.course.progress.PATIENCE", 0.1)
    (tmp_path / "my").mkdir()
    with FileLock(tmp_path / "my" / ".progress.lock"):
        (tmp_path / "pyproject.toml").write_text('[project]\nname = "minivllm"\n')
        (tmp_path / "exercises").mkdir()
        monkeypatch.chdir(tmp_path)
        done = course("hint", "3.1")
    assert done.exit_code == 1
    assert "Another command" in done.stderr


def test_a_notebook_whose_source_is_a_list_of_lines_is_read_as_one_text(tmp_path):
    path = tmp_path / "x.ipynb"
    cells = [
        {
            "cell_type": "code",
            "source": ["a\n", "b"],
            "metadata": {"minivllm": {"kind": "figure", "name": "x"}},
        },
        {"cell_type": "markdown", "source": "no"},
        {"cell_type": "code", "source": "c", "metadata": {"minivllm": {"kind": "check", "name": "3.1"}}},
    ]
    path.write_text(json.dumps({"cells": cells}))
    assert read_cells(path) == [CodeCell("a\nb"), CodeCell("c", "check", "3.1")]
    path.write_text(json.dumps({"cells": [[]]}))
    with pytest.raises(DamagedNotebook):
        read_cells(path)
