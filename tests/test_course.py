"""The course: one source for exercise and solution, checks that name the mistake, the real model."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from answers_ch03 import looked_then_deleted, one_by_one, pool

from minivllm import LLM, SamplingParams, course
from minivllm.course import manifest
from minivllm.course.answers import answer_source, stub_source
from minivllm.course.build import build
from minivllm.course.checking import expect, refuses
from minivllm.course.gate import SHARE, CheckTooSlow, gate, passes, survivors
from minivllm.course.mutants import mutants
from minivllm.course.notebook import Cell, notebook, parse
from minivllm.errors import InvalidOption, OutOfBlocks
from minivllm.memory import paged, paged_store
from minivllm.memory.blocks import BlockPool
from minivllm.memory.buddy import BuddyAllocator

EXERCISES = [e for chapter in manifest.chapters() for e in chapter.exercises]
SOURCE = '''# %% [markdown]
# # Paging
#
# Two exercises.
# %%
from collections.abc import Sequence
from minivllm import course
from minivllm.errors import OutOfBlocks
from minivllm.memory import blocks
# %% [exercise 3.1]
...
# %% [check 3.1]
course.check("3.1", slot_mapping)
# %% [exercise 3.2]
class BlockPool(blocks.BlockPool):
    """The pool, with a method of your own."""

    ...

# %% [check 3.2]
course.check("3.2", BlockPool)
'''


def packages_answer(exercise: manifest.Exercise) -> Any:
    """The solution: the owner's class for a method, else the function."""
    owner, _, answer = manifest.resolve(exercise.answer)
    return owner if isinstance(owner, type) else answer


def test_the_manifest_is_whole():
    numbers = [chapter.number for chapter in manifest.chapters()]
    assert numbers == sorted(set(numbers))
    assert len({e.id for e in EXERCISES}) == len(EXERCISES)
    for chapter in manifest.chapters():
        assert all(number < chapter.number for number in chapter.prerequisites)
        assert 1 <= chapter.difficulty <= 5
        assert chapter.minutes > 0
        assert all(e.id.split(".")[0] == str(chapter.number) for e in chapter.exercises)
    for e in EXERCISES:
        assert len(e.hints) == 3
        assert isinstance(manifest.resolve(e.answer)[2], types.FunctionType)
    with pytest.raises(InvalidOption, match=r"no exercise '9.9'; there are .*3.1"):
        manifest.exercise("9.9")
    with pytest.raises(InvalidOption, match="no name"):
        manifest.resolve("nonsense.name")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_the_packages_own_answer_passes_and_the_stub_says_what_to_do(exercise):
    assert course.check(exercise.id, packages_answer(exercise)).endswith("right.")
    names: dict[str, Any] = {
        "course": course,
        **vars(sys.modules[manifest.resolve(exercise.answer)[2].__module__]),
    }
    exec(stub_source(exercise), names)
    stub = names[exercise.answer.rsplit(".", 1)[1]]
    owner = manifest.resolve(exercise.answer)[0]
    mine = type("Mine", (owner,), {stub.__name__: stub}) if isinstance(owner, type) else stub
    with pytest.raises(course.ExerciseUnsolved, match=re.escape(f"Exercise {exercise.id}")) as error:
        course.check(exercise.id, mine)
    assert exercise.hints[0] in str(error.value)
    assert inspect.getdoc(stub) == inspect.getdoc(manifest.resolve(exercise.answer)[2])


ANSWERS = [import_module(f"answers_ch{chapter.number:02d}") for chapter in manifest.chapters()]
RIGHT = [(e, answer) for module in ANSWERS for e, answers in module.RIGHT.items() for answer in answers]
WRONG = [one for module in ANSWERS for one in module.WRONG]


def test_every_exercise_has_a_second_right_answer_and_named_wrong_ones():
    assert {e for e, _ in RIGHT} == {e for e, _, _ in WRONG} == {e.id for e in EXERCISES}


@pytest.mark.parametrize("exercise_id, answer", RIGHT, ids=[f"{e}-{i}" for i, (e, _) in enumerate(RIGHT)])
def test_a_right_answer_that_is_built_differently_passes(exercise_id, answer):
    assert course.check(exercise_id, answer)


@pytest.mark.parametrize("exercise_id, answer, named", WRONG, ids=[f"{e}-{n}" for e, _, n in WRONG])
def test_a_wrong_answer_is_refused_and_its_mistake_named(exercise_id, answer, named):
    with pytest.raises(course.CheckFailed, match=named):
        course.check(exercise_id, answer)


@pytest.mark.parametrize(
    "got, expected, named",
    [
        (34.0, 34, "its type is not: int is wanted, not float"),
        (True, 1, "its type is not: int is wanted, not bool"),
        ((160,), [160], "its type is not: list is wanted, not tuple"),
        (np.array([1, 2]), [1, 2], r"expected \[1, 2\], got array"),
        (np.array([1, 2]), np.array([1, 2]), "expected array"),
        (torch.tensor([1, 2]), [1, 2], r"got tensor\(\[1, 2\]\)\.$"),
        ([np.array([1, 2])], [[1, 2]], "expected"),
        ([[1], [2]], [1, 2], r"got \[\[1\], \[2\]\]\.$"),
        ((7,), [8], "got .*It looks as if one is missing"),
    ],
    ids=range(9),
)
def test_what_is_not_as_expected_is_said_whatever_came(got, expected, named):
    with pytest.raises(course.CheckFailed, match=f"^f: .*{named}"):
        expect("f", got, expected, {"one is missing": ([7],)})


def test_the_same_value_of_the_same_type_is_as_expected():
    for value in (34, 34.0, [160], (160,), [[1], [2]], {1: [2]}, None):
        expect("f", value, value)


def test_another_error_than_the_one_wanted_is_explained_and_a_stub_speaks_for_itself():
    def fail(error):
        raise error

    refuses("f()", OutOfBlocks, fail, OutOfBlocks("none free"))
    with pytest.raises(course.CheckFailed, match=r"^f\(\): expected OutOfBlocks, got KeyError: 7\.$"):
        refuses("f()", OutOfBlocks, fail, KeyError(7))
    with pytest.raises(course.CheckFailed, match=r"got 3\. What cannot be done"):
        refuses("f()", OutOfBlocks, lambda: 3)
    for error in (course.ExerciseUnsolved("a hint"), KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)):
            refuses("f()", Exception, fail, error)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "ch03_paging.py").write_text(SOURCE)
    return tmp_path


def code_of(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def test_a_cell_tells_its_kind_its_name_and_what_a_figure_shows():
    source = """# %% [compare sizes]
print(1)
# %% [figure map]
#| alt: Twelve blocks,
#| three of them free.
draw()
# %% [widget]
slider()
# %%
# %matplotlib inline \t
plain
"""
    assert parse(source) == [
        Cell("compare", "print(1)", "sizes"),
        Cell("figure", "draw()", "map", "Twelve blocks, three of them free."),
        Cell("widget", "slider()"),
        Cell("code", "%matplotlib inline\nplain"),
    ]
    assert [cell.metadata for cell in notebook(parse(source)).cells] == [
        {"minivllm": {"kind": "compare", "name": "sizes"}, "tags": ["nbval-check-output"]},
        {
            "minivllm": {"kind": "figure", "name": "map"},
            "mystnb": {"image": {"alt": "Twelve blocks, three of them free."}},
        },
        {"minivllm": {"kind": "widget"}},
        {},
    ]


def test_both_notebooks_come_from_one_source(root):
    solution, exercise = build(root)
    assert (solution.parent.name, exercise.parent.name) == ("solutions", "exercises")
    names: dict[str, Any] = {}
    for source in code_of(solution):
        exec(source, names)
    assert answer_source(manifest.exercise("3.1")) in code_of(solution)
    names, failed = {}, []
    for source in code_of(exercise):
        try:
            exec(source, names)
        except course.ExerciseUnsolved as error:
            failed.append((source.splitlines()[0], str(error)[:12]))
    assert failed == [
        ('course.check("3.1", slot_mapping)', "Exercise 3.1"),
        ('course.check("3.2", BlockPool)', "Exercise 3.2"),
    ], "an exercise fails at its checks and nowhere else"
    assert "self._free" not in exercise.read_text()


def test_notebooks_are_the_same_to_the_byte_in_every_process(root):
    def built() -> list[bytes]:
        command = [sys.executable, "-m", "minivllm.course.build", str(root)]
        assert subprocess.run(command, capture_output=True).returncode == 0
        return [path.read_bytes() for path in sorted(root.glob("*/*.ipynb"))]

    first = built()
    assert len(first) == 2
    assert built() == first
    for text in first:
        nbformat.validate(nbformat.reads(text.decode(), 4))
        ids = [cell["id"] for cell in json.loads(text)["cells"]]
        assert len(set(ids)) == len(ids)


def test_an_id_stays_when_another_cell_changes_and_equal_cells_have_ids_of_their_own():
    cells = [Cell("code", "a"), Cell("code", "b"), Cell("code", "a"), Cell("markdown", "a")]
    ids = [cell.id for cell in notebook(cells).cells]
    changed = [cell.id for cell in notebook([cells[0], Cell("code", "c"), *cells[2:]]).cells]
    assert len(set(ids)) == 4
    assert [a == b for a, b in zip(ids, changed, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize(
    "source, named",
    [
        ("x = 1\n# %%\n", "Line 1"),
        ("# %%\n# %% [markdwon]\n", "Line 2"),
        ("# %%\nx\n# %% [exercise]\n...", "Line 3"),
        ("# %% [compare]\nx", "Line 1"),
        ("# %% [figure Block]\nx", "Line 1"),
        ("# %% [widget here]\nx", "Line 1"),
        ("# %% [figure map]\ndraw()", "#\\| alt:"),
        ("# %% [code a]\nx\n# %% [compare a]\nx", "Two cells have the name 'a'"),
        ("# %% [markdown 3.1]\n# x", "Line 1"),
        ("# %%nonsense\n", "Line 1"),
        ("# %%\nx\n#%%\ny", "Line 3 begins no cell: '#%%'"),
        ("# %%\nx\n  # %% [code b]\ny", "Line 3 begins no cell: '  # %%"),
        ("# %%\nx\n#\t%%\ny", "Line 3"),
        ("# %%\nx\n# %% [check 3.1]\n\n  \n# %%\n", "Line 3 begins a cell of kind check with nothing"),
        ("# %% [exercise 3.1]\n", "Line 1 begins a cell of kind exercise with nothing"),
        ("# %% [figure map]\n#| alt: a\n", "Line 1 begins a cell of kind figure with nothing"),
    ],
)
def test_a_source_that_is_cut_wrongly_is_refused_with_its_line(source, named):
    with pytest.raises(InvalidOption, match=named):
        parse(source)


@pytest.mark.parametrize("body", ["pass", "...\n...\n"])
def test_a_cell_without_one_place_for_its_answer_is_refused(root, body):
    (root / "solutions" / "ch03_paging.py").write_text(f"# %% [exercise 3.1]\n{body}\n")
    with pytest.raises(InvalidOption, match="lines of"):
        list(build(root))


@pytest.mark.parametrize(
    "check",
    ["", '# %% [check 3.2]\ncourse.check("3.2", f)', '# %% [check 3.1]\ncourse.check("3.2", f)'],
    ids=["none", "another's", "names another"],
)
def test_an_exercise_without_its_own_check_is_refused(root, check):
    (root / "solutions" / "ch03_paging.py").write_text(f"# %% [exercise 3.1]\n...\n{check}\n")
    with pytest.raises(InvalidOption, match=r"Exercise 3\.1 has no check"):
        list(build(root))


def test_only_the_end_of_a_line_cuts_a_line():
    text = "x = 'a\f# %% b\x85# %% c\u2028# %%'"
    assert parse(f"# %%\n{text}\n") == [Cell("code", text)]


def test_the_real_engine_runs_on_a_readers_own_code_and_is_itself_again_after(monkeypatch):
    used = []

    def mine(table, size, start, end):
        used.append(end)
        return one_by_one(table, size, start, end)

    def allocate(self, n):
        used.append(-n)
        return looked_then_deleted(self, n)

    original = paged.slot_mapping, paged_store.slot_mapping, BlockPool.allocate
    llm = LLM("random:tiny-llama", num_blocks=40, sharing=False)  # as chapter 3 runs it
    params = SamplingParams(temperature=0, max_tokens=5)
    expected = llm.generate("abc", params)[0].outputs[0].token_ids
    with course.use("3.1", mine), course.use("3.2", pool(allocate)):
        assert llm.generate("abc", params)[0].outputs[0].token_ids == expected
    assert max(used) == 7
    assert min(used) == -1
    with pytest.raises(ZeroDivisionError), course.use("3.1", mine):
        1 / 0  # noqa: B018
    assert (paged.slot_mapping, paged_store.slot_mapping, BlockPool.allocate) == original


def test_a_static_method_stays_one_while_a_readers_is_in_its_place():
    def mine(n):
        return 64

    with course.use("2.1", type("Mine", (), {"run_length": staticmethod(mine)})):
        assert BuddyAllocator(64).run_length(3) == BuddyAllocator.run_length(3) == 64
    assert BuddyAllocator(64).run_length(3) == BuddyAllocator.run_length(3) == 4


def test_a_mutant_differs_in_one_place_and_leaves_signature_and_docstring():
    source = '''
def clip(x, low=0, high=9):
    """At least 1."""
    if x < low or x > high:
        x = max(low, min(x, high)) + 0
    return x
'''
    found = dict(mutants(source))
    assert len(found) == len(set(found.values())) == 8
    for text in found.values():
        assert text.startswith('def clip(x, low=0, high=9):\n    """At least 1."""')
        compile(text, "mutant", "exec")
    changes = "\n".join(found)
    for part in ("x < low", "x > high", "or", "+ 0", "return x"):
        assert part in changes


def test_a_mutant_that_hangs_is_killed_and_counts_as_refused():
    hanging = "def slot_mapping(table, size, start, end):\n    while True:\n        pass"
    assert not passes(manifest.exercise("3.1"), hanging)
    assert passes(manifest.exercise("3.1"), answer_source(manifest.exercise("3.1")))


def test_a_gate_that_refuses_the_right_answer_says_so(monkeypatch):
    monkeypatch.setattr("minivllm.course.gate.PATIENCE", 0.0)
    with pytest.raises(CheckTooSlow, match=r"exercise 3\.1 .* own answer"):
        list(gate(manifest.exercise("3.1"), sample=1))


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_checks_refuse_a_sample_of_mutants(exercise):
    count, left = survivors(gate(exercise, sample=8))
    assert count > 0
    assert count - len(left) >= SHARE * count, left
