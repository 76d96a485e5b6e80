"""The package can be read upward from chapter 0: no module uses what a later chapter brings."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import staircase

TESTS = Path(__file__).parent
MODULES = staircase.modules()
CHAPTERS = staircase.chapters()
WRITTEN = sorted(set(CHAPTERS.values()) - {staircase.ABOVE})
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
TORCH_FREE = [
    "params",
    "outputs",
    "decoding.stopping",
    "decoding.beams",
    "errors",
    "memory.manager",
    "memory.naive",
    "memory.buddy",
    "memory.contiguous",
    "memory.blocks",
    "memory.paged",
    "memory.table_rows",
    "memory.swap",
    "memory.sharing",
    "memory.prefix_cache",
    "memory.prefix_index",
    "memory.prefix_pool",
    "memory.prefix_stats",
    "memory.radix",
    "scheduling.request",
    "scheduling.request_memory",
    "scheduling.queue",
    "scheduling.groups",
    "scheduling.continuous",
    "scheduling.static",
    "scheduling.chunked",
    "model.config",
    "model.presets",
    "model.hub",
]


MUTATORS = {"append", "add", "update", "pop", "clear", "setdefault", "extend", "remove", "insert"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=TESTS.parent, env=ENVIRONMENT
    )


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_which_chapter_it_belongs_to(name):
    assert staircase.chapter_of(MODULES[name]) is not None


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_its_own_chapter_or_earlier_ones(name):
    later = {m: CHAPTERS[m] for m in staircase.imports_of(MODULES[name]) if CHAPTERS[m] > CHAPTERS[name]}
    assert not later, f"{name} (chapter {CHAPTERS[name]}) imports from later chapters"


def test_imports_go_in_no_circle():
    graph = {name: staircase.imports_of(path) - {name} for name, path in MODULES.items()}
    graph["minivllm.cli"] = set()  # a command is imported when it is run, by its name
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize("path", sorted(staircase.ROOT.rglob("*.py")), ids=staircase.name_of)
def test_no_star_import_and_no_state_in_a_module(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.ImportFrom) and node.names[0].name == "*"), "star import"
        assert not isinstance(node, ast.Global), "a function that rebinds a name of its module"
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            continue  # a name for a type
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [leaf for t in targets for leaf in (t.elts if isinstance(t, ast.Tuple) else [t])]
            for target in names:
                name = target.id if isinstance(target, ast.Name) else ""
                constant = name.strip("_").isupper() or name in (
                    "__all__",
                    "__version__",
                    "logger",
                    "Progress",
                )
                assert constant, f"{ast.unparse(target)} is set at module level and is no constant"


def test_a_constant_is_not_changed_by_a_function():
    """A module-level list or table in capitals is a constant: nothing appends to it or sets its items."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            changed = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = node.value
            if isinstance(node, ast.Attribute) and node.attr in MUTATORS:
                changed = node.value
            if isinstance(changed, ast.Name):
                assert not changed.id.strip("_").isupper(), f"{name} changes {changed.id}"


@pytest.mark.parametrize("chapter", WRITTEN)
def test_a_chapters_tests_pass_with_nothing_later_in_reach(chapter):
    files = sorted(str(p) for p in TESTS.glob(f"test_ch{chapter:02d}_*.py"))
    assert files, f"chapter {chapter} has no tests of its own"
    done = run(
        "-m", "pytest", "-p", "staircase_plugin", f"--chapter={chapter}", "-p", "no:cacheprovider", *files
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_plugin_does_refuse_what_comes_later(tmp_path):
    (tmp_path / "test_early.py").write_text("def test_it():\n    import minivllm.memory.naive\n")
    done = run(
        "-m", "pytest", "-p", "staircase_plugin", "--chapter=0", "-p", "no:cacheprovider", str(tmp_path)
    )
    assert done.returncode == 1
    assert "minivllm.memory.naive is not there yet in chapter 0" in done.stdout


def test_what_plans_and_counts_needs_no_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
    done = run("-c", code + "\n".join(f"import minivllm.{name}" for name in TORCH_FREE))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "package", ["minivllm", "minivllm.memory", "minivllm.model", "minivllm.decoding", "minivllm.lab"]
)
def test_a_package_pulls_in_nothing_by_itself(package):
    code = (
        f"import sys; before = set(sys.modules); import {package}; print(*sorted(set(sys.modules) - before))"
    )
    names = run("-c", code).stdout.split()
    assert package in names
    loaded = {n for n in names if n.startswith("minivllm.") and not package.startswith(n)}
    assert not loaded
    assert not {"torch", "triton", "transformers", "numpy"} & set(names)


HEAVY = {"gguf", "huggingface_hub", "matplotlib", "safetensors", "tokenizers", "transformers", "triton"}


def test_the_front_door_opens_without_what_only_some_models_and_commands_need():
    """Each takes from 0.1 s to seconds to import. What torch brings by itself does not count."""
    code = "import sys, torch; before = set(sys.modules); from minivllm import LLM, SamplingParams\n"
    done = run("-c", code + "print(*sorted(set(sys.modules) - before))")
    names = {name.split(".")[0] for name in done.stdout.split()}
    assert "minivllm" in names, done.stderr
    assert not HEAVY & names


def test_names_of_the_package_come_when_they_are_asked_for():
    import minivllm

    for name in minivllm.__all__:
        assert getattr(minivllm, name) is not None
        assert name in dir(minivllm)
    with pytest.raises(AttributeError, match="nonsense"):
        minivllm.nonsense  # noqa: B018
