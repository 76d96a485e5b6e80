"""The course: one source for exercise and solution, checks that name the mistake, the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from minivllm import LLM, SamplingParams, course
from minivllm.course import manifest
from minivllm.course.answers import answer_source, stub_source
from minivllm.course.build import build
from minivllm.course.gate import SHARE, gate, passes, survivors
from minivllm.course.mutants import mutants
from minivllm.course.notebook import Cell, notebook, parse
from minivllm.errors import InvalidOption, OutOfBlocks
from minivllm.memory import paged, paged_store
from minivllm.memory.blocks import BlockPool

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
    with pytest.raises(InvalidOption, match=r"no exercise '9.9'; there are 3.1"):
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
    assert stub.__doc__ == manifest.resolve(exercise.answer)[2].__doc__


def pool(allocate: Callable[..., Any]) -> type[BlockPool]:
    return type("Mine", (BlockPool,), {"allocate": allocate})


def append_then_refuse(self, n):
    taken = []
    for _ in range(n):
        if not self._free:
            raise OutOfBlocks("too few")
        taken.append(self._free.popitem(last=False)[0])
    return taken


def never_refuse(self, n):
    return [self._free.popitem(last=False)[0] for _ in range(min(n, len(self._free)))]


def last_first(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return [self._free.popitem()[0] for _ in range(n)]


def pairs(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return [self._free.popitem(last=False) for _ in range(n)]


def only_looked(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return list(self._free)[:n]


def looked_then_deleted(self, n):
    """Right, in another way."""
    if len(self._free) - n < 0:
        raise OutOfBlocks("too few")
    taken = [block for _, block in zip(range(n), self._free, strict=False)]
    for block in taken:
        del self._free[block]
    return taken


def one_by_one(table, size, start, end):
    """Right, in another way."""
    slots = []
    for token in range(start, end):
        block, offset = divmod(token, size)
        slots.append(table[block] * size + offset)
    return slots


@pytest.mark.parametrize(
    "exercise_id, answer", [("3.1", one_by_one), ("3.2", pool(looked_then_deleted))], ids=["3.1", "3.2"]
)
def test_a_right_answer_that_is_built_differently_passes(exercise_id, answer):
    assert course.check(exercise_id, answer)


def one_too_many(t, b, s, e):
    return [t[i // b] * b + i % b for i in range(s, e + 1) if i // b < len(t)]


def from_the_start(t, b, s, e):
    return [t[i // b] * b + i % b for i in range(e - s)]


WRONG = [
    ("3.1", one_too_many, "end is not included"),
    ("3.1", from_the_start, "from the start of the sequence"),
    ("3.1", lambda t, b, s, e: [t[0] * b + i for i in range(s, e)], "side by side"),
    ("3.1", lambda t, b, s, e: [t[i // b] + i % b * b for i in range(s, e)], "changed places"),
    ("3.1", lambda t, b, s, e: None, "expected"),
    ("3.2", pool(append_then_refuse), "before the refusal"),
    ("3.2", pool(never_refuse), "OutOfBlocks"),
    ("3.2", pool(last_first), "given back last"),
    ("3.2", pool(pairs), "not pairs"),
    ("3.2", pool(only_looked), "still count as free"),
]  # fmt: skip


@pytest.mark.parametrize("exercise_id, answer, named", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_answer_is_refused_and_its_mistake_named(exercise_id, answer, named):
    with pytest.raises(course.CheckFailed, match=named):
        course.check(exercise_id, answer)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "ch03_paging.py").write_text(SOURCE)
    return tmp_path


def code_of(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


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
        ("# %% [markdown 3.1]\n# x", "Line 1"),
        ("# %%nonsense\n", "Line 1"),
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


def test_the_real_engine_runs_on_a_readers_own_code_and_is_itself_again_after(monkeypatch):
    used = []

    def mine(table, size, start, end):
        used.append(end)
        return one_by_one(table, size, start, end)

    def allocate(self, n):
        used.append(-n)
        return looked_then_deleted(self, n)

    original = paged.slot_mapping, paged_store.slot_mapping, BlockPool.allocate
    llm = LLM("random:tiny-llama", num_blocks=40)
    params = SamplingParams(temperature=0, max_tokens=5)
    expected = llm.generate("abc", params)[0].outputs[0].token_ids
    with course.use("3.1", mine), course.use("3.2", pool(allocate)):
        assert llm.generate("abc", params)[0].outputs[0].token_ids == expected
    assert max(used) == 7
    assert min(used) == -1
    with pytest.raises(ZeroDivisionError), course.use("3.1", mine):
        1 / 0  # noqa: B018
    assert (paged.slot_mapping, paged_store.slot_mapping, BlockPool.allocate) == original


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


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_checks_refuse_a_sample_of_mutants(exercise):
    count, left = survivors(gate(exercise, sample=8))
    assert count > 0
    assert count - len(left) >= SHARE * count, left
