"""The files that set the project up agree with each other and do what they promise."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
CORE = [Requirement(line) for line in PYPROJECT["project"]["dependencies"]]
OPTIONAL = [Requirement(line) for lines in EXTRAS.values() for line in lines]
BUILD = [Requirement(line) for line in PYPROJECT["build-system"]["requires"]]
PIN_LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
PINS: dict[str, Version] = {
    canonicalize_name(name): Version(pin) for name, _, pin in (line.partition("==") for line in PIN_LINES)
}

TARGETS = {"help", "demo", "test", "test-full", "test-book", "gate", "check", "format"}
TARGETS |= {"exercises", "notebooks", "sync", "lab", "book", "env", "clean"}
IN_PROJECT_VENV = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


def installed_version(name: str) -> Version | None:
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


def applies(requirement: Requirement, extras: frozenset[str] = frozenset()) -> bool:
    """Whether the requirement's marker holds on this machine, for any of the extras asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


def run(*command: str, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as from a fresh shell: a make that runs these tests must not be seen by another."""
    of_make = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "GNUMAKEFLAGS", "PYTHON"}
    env = {name: value for name, value in os.environ.items() if name not in of_make}
    env["PATH"] = path or env["PATH"]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def write_script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def make_newer(path: Path) -> None:
    later = path.stat().st_mtime + 60
    os.utime(path, (later, later))


@pytest.fixture
def project_copy(tmp_path: Path) -> Path:
    """A folder with the Makefile and what it reads, where it may remove and make what it likes."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


# --- pyproject.toml, constraints.txt, environment.yml ---


def test_every_constraint_is_one_name_and_one_exact_version():
    assert not [line for line in PIN_LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)]


def test_no_package_is_pinned_twice():
    assert len(PINS) == len(PIN_LINES)


@pytest.mark.parametrize("requirement", [*CORE, *OPTIONAL, *BUILD], ids=str)
def test_a_direct_dependency_is_pinned_to_a_version_within_its_bound(requirement):
    assert requirement.specifier, "a direct dependency says which versions it needs"
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("name", ["pip", "hatchling", "editables"])
def test_the_tools_that_install_the_project_are_pinned(name):
    assert name in PINS


def test_torch_and_triton_are_pinned_as_a_pair():
    assert (str(PINS["torch"]), str(PINS["triton"])) == ("2.13.0", "3.7.1")


def test_the_installed_torch_asks_for_no_other_triton_than_the_pinned_one():
    torch = installed_version("torch")
    assert torch is not None
    if torch.public == str(PINS["torch"]):  # another torch has another triton
        asked_for = [r for r in map(Requirement, requires("torch") or []) if r.name == "triton"]
        assert all(r.specifier.contains(PINS["triton"]) for r in asked_for)


def test_conda_users_get_the_same_set():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *from_conda, from_pip = environment["dependencies"]
    python = next(line for line in from_conda if line.startswith("python="))
    assert python in {"python=3.11", "python=3.12", "python=3.13"}
    assert "pip" in from_conda

    constraint, editable = from_pip["pip"]
    assert constraint == "--constraint constraints.txt"
    extras = re.fullmatch(r"--editable \.\[(.+)\]", editable)
    assert extras is not None
    assert sorted(extras[1].split(",")) == sorted(EXTRAS)


def test_make_installs_every_extra_under_the_constraints():
    makefile = (ROOT / "Makefile").read_text()
    extras = re.findall(r"^(?:BOOK_)?EXTRAS := (.+)$", makefile, re.MULTILINE)
    assert sorted(",".join(extras).split(",")) == sorted(EXTRAS)
    pip_lines = [line for line in makefile.splitlines() if "pip install" in line and "echo" not in line]
    assert pip_lines
    assert all("--constraint constraints.txt" in line for line in pip_lines)


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run", ".gitignore"]
)
def test_no_file_names_a_host_or_a_folder_of_one_machine(name):
    text = (ROOT / name).read_text()
    assert not re.findall(r"\w+://\S*|--(?:extra-)?index-url|--find-links", text)
    assert not re.findall(r"\b(?:[\w-]+\.)+(?:ai|co|com|dev|io|net|org)\b", text)
    assert not re.findall(r"(?<![\w.])/(?:home|mnt|opt|root|srv|tmp|Users|var|work)\b", text)


# --- what is installed ---


def test_installed_versions_are_those_promised():
    if IN_PROJECT_VENV:
        found = {name: installed_version(name) for name in PINS}
        wrong = {n: str(v) for n, v in found.items() if v is not None and v.public != str(PINS[n])}
    else:  # any set within the loose bounds will do
        found = {r.name: installed_version(r.name) for r in [*CORE, *OPTIONAL] if applies(r)}
        assert all(found[r.name] for r in CORE if applies(r))
        bounds = {r.name: r.specifier for r in [*CORE, *OPTIONAL]}
        wrong = {
            n: str(v) for n, v in found.items() if v and not bounds[n].contains(v.public, prereleases=True)
        }
    assert not wrong


def test_all_that_the_project_needs_here_is_pinned():
    """Follow the requirements from package to package, as pip does. A CUDA build of torch chooses its own."""
    if not (IN_PROJECT_VENV and sys.platform == "linux"):
        return  # other machines need other packages, and other versions may too
    seen: set[tuple[str, frozenset[str]]] = set()
    # The book's tools come when it is first built. What they need is looked at then, by make test-book.
    later = {Requirement(line).name for line in EXTRAS["book"]}
    todo = [r for r in [*CORE, *OPTIONAL, *BUILD] if applies(r)]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) not in seen and not name.startswith(("cuda-", "nvidia-")):
            seen.add((name, extras))
            if requirement.name in later and installed_version(name) is None:
                continue
            todo += [r for r in map(Requirement, requires(name) or []) if applies(r, extras)]
    needed = {name for name, _ in seen}
    assert len(needed) > len(CORE) + len(OPTIONAL)
    assert not needed - PINS.keys()


# --- Makefile, .ci/run, .gitignore ---


def test_make_alone_lists_every_target_with_what_it_does():
    lines = re.findall(r"^  make (\S+) +(\S.+)$", run("make", cwd=ROOT).stdout, re.MULTILINE)
    assert dict(lines).keys() == TARGETS
    assert run("make", "help", cwd=ROOT).stdout == run("make", cwd=ROOT).stdout


def test_make_refuses_a_python_that_is_too_old_and_says_what_to_do(project_copy):
    old = write_script(project_copy / "old python", "echo 3.9.18")
    result = run("make", "env", f"PYTHON={old}", cwd=project_copy)
    assert result.returncode != 0
    assert f"{old} (3.9.18)" in result.stderr
    assert "needs Python 3.11 or newer" in result.stderr
    assert "make PYTHON=" in result.stderr
    assert not (project_copy / ".venv").exists()


def test_make_refuses_a_python_that_cannot_make_environments_and_says_what_to_do(project_copy):
    bare = write_script(project_copy / "bare", 'case "$2" in *ensurepip*) exit 1 ;; esac', "echo 3.12.4")
    result = run("make", "env", f"PYTHON={bare}", cwd=project_copy)
    assert result.returncode != 0
    assert "apt install python3.12-venv" in result.stderr
    assert not (project_copy / ".venv").exists()


def test_make_looks_for_another_python_when_python3_is_too_old(project_copy):
    commands = project_copy / "commands"
    commands.mkdir()
    write_script(commands / "python3", "echo 3.10.12")
    write_script(commands / "python3.13", "exit 127")
    write_script(commands / "python3.12", 'case "$1" in -m) exit 1 ;; esac', "echo 3.12.4")
    result = run("make", "env", cwd=project_copy, path=f"{commands}:{os.environ['PATH']}")
    assert "Making .venv with python3.12 (3.12.4)" in result.stdout


def make_venv(project: Path, made_in: Path | None, python: str) -> Path:
    """A stand-in for .venv, with its stamp for the folder it was made in and a script for its Python."""
    venv = project / ".venv"
    (venv / "bin").mkdir(parents=True)
    write_script(venv / "bin" / "python", python)
    if made_in is not None:
        (venv / ".made").write_text(f"{made_in.resolve()}\n")
    return venv


@pytest.mark.parametrize("state", ["moved", "broken", "unfinished"])
def test_make_removes_a_venv_that_is_moved_or_broken_or_unfinished(state, project_copy):
    made_in = {"moved": project_copy / "elsewhere", "broken": project_copy, "unfinished": None}[state]
    venv = make_venv(project_copy, made_in, "exit 127" if state == "broken" else "exit 0")
    result = run("make", "env", "PYTHON=no-such-python", cwd=project_copy)
    assert result.returncode != 0
    assert "Removing .venv" in result.stdout
    assert not venv.exists()


def test_make_leaves_a_whole_venv_as_it_is(project_copy):
    venv = make_venv(project_copy, project_copy, 'case "$*" in *pip\\ install*) touch .venv/changed ;; esac')
    assert run("make", "env", cwd=project_copy).stdout == ".venv is ready.\n"
    assert not (venv / "changed").exists()


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_file_named_like_a_target_does_not_hide_it(target, project_copy):
    make_venv(project_copy, project_copy, "exit 0")
    (project_copy / target).touch()
    make_newer(project_copy / target)
    assert "is up to date" not in run("make", "--dry-run", target, cwd=project_copy).stdout


def test_make_updates_a_venv_that_is_older_than_the_constraints(project_copy):
    make_venv(project_copy, project_copy, 'case "$*" in *pip\\ install*) echo "$@" >>pip_calls ;; esac')
    make_newer(project_copy / "constraints.txt")
    assert run("make", "env", cwd=project_copy).returncode == 0
    upgrade, install = (project_copy / "pip_calls").read_text().splitlines()
    assert "pip hatchling editables" in upgrade
    assert "--editable .[" in install


@pytest.mark.parametrize("failing", ["--quiet", "--editable"], ids=["build tools", "packages"])
def test_a_failing_pip_stops_make_with_a_message_and_is_tried_again(failing, project_copy):
    make_venv(project_copy, project_copy, f'case "$*" in *{failing}*) echo "No network." >&2; exit 1 ;; esac')
    make_newer(project_copy / "constraints.txt")
    for _ in range(2):
        result = run("make", "env", cwd=project_copy)
        assert result.returncode != 0
        assert ".venv is ready." not in result.stdout
        assert re.search(r"No network\.\n\npip could not install .* network", result.stderr, re.DOTALL)


def test_a_failing_first_install_leaves_no_stamp(project_copy):
    python = write_script(
        project_copy / "python",
        'if [ "$1" = -m ]; then mkdir -p .venv/bin && cp failing .venv/bin/python; fi',
        "echo 3.12.4",
    )
    write_script(project_copy / "failing", "exit 1")
    assert run("make", "env", f"PYTHON={python}", cwd=project_copy).returncode != 0
    assert [path.name for path in (project_copy / ".venv").iterdir()] == ["bin"]


def book_project(project: Path, install: str) -> Path:
    """A whole .venv, whose Python does this when pip is asked for the book's tools."""
    pip = f'*"[book]"*) echo "$@" >>pip_calls; {install} ;;'
    return make_venv(project, project, f'case "$*" in {pip} *sphinx*) echo "$@" >>sphinx_calls ;; esac')


def test_make_book_adds_its_tools_once_and_builds_each_time(project_copy):
    book_project(project_copy, "exit 0")
    for _ in range(2):
        result = run("make", "book", cwd=project_copy)
        assert result.returncode == 0
        assert result.stdout.splitlines()[-1].endswith(f"{project_copy}/book/_build/html/index.html")
    (install,) = (project_copy / "pip_calls").read_text().splitlines()
    assert "--constraint constraints.txt" in install
    builds = (project_copy / "sphinx_calls").read_text().splitlines()
    assert len(builds) == 2
    assert all({"-W", "--keep-going", "-n"} <= set(build.split()) for build in builds)


def test_make_book_updates_its_tools_after_the_environment(project_copy):
    venv = book_project(project_copy, "exit 0")
    run("make", "book", cwd=project_copy)
    make_newer(venv / ".made")
    assert run("make", "book", cwd=project_copy).returncode == 0
    assert len((project_copy / "pip_calls").read_text().splitlines()) == 2


def test_a_failing_install_of_the_books_tools_says_why_and_is_tried_again(project_copy):
    venv = book_project(project_copy, 'echo "No network." >&2; exit 1')
    for _ in range(2):
        result = run("make", "book", cwd=project_copy)
        assert result.returncode != 0
        assert re.search(r"No network\.\n\npip could not install .* network", result.stderr, re.DOTALL)
    assert len((project_copy / "pip_calls").read_text().splitlines()) == 2
    assert not (project_copy / "sphinx_calls").exists()
    assert (venv / ".made").exists()


def test_make_without_the_book_needs_none_of_its_tools(project_copy):
    book_project(project_copy, "exit 1")
    assert run("make", "env", cwd=project_copy).returncode == 0
    assert not (project_copy / "pip_calls").exists()


def test_the_tests_of_the_books_pages_run_only_when_they_are_named(request):
    if not any("book_site" in argument for argument in request.config.args):
        assert not [item.nodeid for item in request.session.items if "book_site" in item.nodeid]


def test_make_clean_removes_what_can_be_made_again_and_keeps_what_a_reader_wrote(project_copy):
    made = [".venv/bin", ".mypy_cache", ".pytest_cache", "minivllm/__pycache__", "book/_build", "dist"]
    kept = ["my/__pycache__", "my/.ipynb_checkpoints", "book/results", "notebooks"]
    for folder in [*made, *kept]:
        (project_copy / folder).mkdir(parents=True)
    for _ in range(2):
        assert run("make", "clean", cwd=project_copy).returncode == 0
    assert not [folder for folder in made if (project_copy / folder).exists()]
    assert all((project_copy / folder).exists() for folder in kept)


CI_TARGETS = ["check", "test", "test-book"]


@pytest.mark.parametrize("failing", [*CI_TARGETS, "none"])
def test_ci_runs_the_checks_then_the_tests_and_stops_at_the_first_failure(failing, tmp_path):
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    write_script(tmp_path / "make", 'echo "$PWD: make $*"', f'[ "$*" != {failing} ]')
    write_script(tmp_path / "chromium", "exit 0")
    result = run(str(script), cwd=tmp_path, path=f"{tmp_path}:{os.environ['PATH']}")
    expected = CI_TARGETS[: CI_TARGETS.index(failing) + 1] if failing in CI_TARGETS else CI_TARGETS
    assert result.stdout.splitlines() == [f"{ROOT}: make {target}" for target in expected]
    assert (result.returncode == 0) == (failing == "none")


@pytest.mark.parametrize("user", ["0", "1000"], ids=["root", "another user"])
@pytest.mark.parametrize("browser", ["chromium", "google-chrome", None], ids=str)
def test_ci_installs_chromium_only_as_root_where_there_is_no_browser(browser, user, tmp_path):
    for name in ("bash", "dirname", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    write_script(tmp_path / "make", "exit 0")
    write_script(tmp_path / "id", f"echo {user}")
    write_script(tmp_path / "apt-get", 'echo "apt-get $*"')
    if browser is not None:
        write_script(tmp_path / browser, "exit 0")
    result = run(str(ROOT / ".ci" / "run"), cwd=tmp_path, path=str(tmp_path))
    assert result.returncode == 0
    assert ("install -y chromium" in result.stdout) == (browser is None and user == "0")


def test_git_leaves_out_the_environment_and_what_a_reader_wrote():
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert {".venv", "my", "__pycache__", "book/_build"} <= ignored


def test_the_readmes_python_runs_as_it_stands(tmp_path, smollm2_source):
    """All blocks, one after the other, in a folder of their own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"memory.png", "timeline.png"}
