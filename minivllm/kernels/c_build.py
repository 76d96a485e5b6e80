"""Chapter 8: the C kernels, compiled by the system's own compiler when they are first asked for.

What the compiler makes is kept in the user's cache folder, and found there by its name: a hash of the
sources, the flags, and what the compiler says of itself and of this CPU. So another compiler, another kind of
machine on the same disk, or an edited source gets a file of its own. The name ends with a hash of the file's
own bytes: one that a full disk or a lost machine cut short is compiled anew, since to load it would end the
process. Processes that start at once compile it once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from minivllm.errors import InvalidOption
from minivllm.model.hub import cache_home

SOURCES = ("c_paged.c", "c_rows.c", "c_linear.c")
HEADERS = ("c_numbers.h",)
COMPILERS = ("cc", "gcc", "clang")
# -fno-trapping-math: nobody asks which operation met NaN or infinity, so that choices by `?:` become vectors.
# Not -ffast-math, which takes NaN and infinity for impossible; with GCC, loading such a library also changes
# how the whole process treats tiny numbers.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-trapping-math", "-fopenmp", "-fPIC")
WHAT_WORKS = (
    "Install a C compiler with OpenMP (on Debian and Ubuntu: apt install gcc libc6-dev), or name one in the "
    "environment variable CC, or take attention='torch'."
)


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels, loaded into this process once.

    Raises InvalidOption without a compiler that works, and where its result cannot be kept or loaded.
    """
    return load(cache_home() / "kernels")


def load(folder: Path) -> ctypes.CDLL:
    """The kernels out of this folder, compiled into it first where they are missing. Raises as `library`."""
    command = [*find_compiler(), *FLAGS]
    files = [Path(__file__).with_name(name) for name in (*SOURCES, *HEADERS)]
    macros = run([*command, "-dM", "-E", "-x", "c", os.devnull])  # its version, and all that the CPU has
    digest = hashlib.sha256("\0".join([*command, macros, *map(Path.read_text, files)]).encode())
    name = f"c_paged-{digest.hexdigest()[:16]}"
    try:
        kept = whole_file(folder, name) or compile_into(folder, name, command, files[: len(SOURCES)])
        return ctypes.CDLL(str(kept))
    except OSError as error:
        raise refusal(
            f"{folder / name} cannot be written or loaded ({error})",
            "Give that folder space and the right to write, or set MINIVLLM_HOME to another folder. Or take "
            "attention='torch'.",
        ) from error


def whole_file(folder: Path, name: str) -> Path | None:
    """The library of this name whose bytes are those that were written, or None. Raises OSError."""
    found = sorted(folder.glob(f"{name}-*.so"))
    return next((path for path in found if path.name == final_name(name, path)), None)


def final_name(name: str, path: Path) -> str:
    """What a library is called with these bytes."""
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so"


def compile_into(folder: Path, name: str, command: list[str], sources: list[Path]) -> Path:
    """Compile to a shared library, unless another process is faster. Raises OSError and InvalidOption."""
    from filelock import FileLock  # here: 0.1 s to import, and what is on disk needs no lock

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        if kept := whole_file(folder, name):
            return kept
        with TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
            made = Path(scratch, f"{name}.so")
            run([*command, "-shared", *map(str, sources), "-o", str(made)])
            if not made.exists():
                raise refusal(f"the compiler {shlex.join(command[:1])} made no file", WHAT_WORKS)
            target = folder / final_name(name, made)
            os.replace(made, target)
            return target


def find_compiler() -> list[str]:
    """The command in CC, or else the first of COMPILERS that is there. Raises InvalidOption without any."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise refusal(
            f"the compiler in CC, {os.environ['CC']!r}, is no command ({error})", WHAT_WORKS
        ) from error
    if named:
        if shutil.which(named[0]) is None:
            raise refusal(f"the compiler in CC, {named[0]}, is not there", WHAT_WORKS)
        return named
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise refusal(f"there is no C compiler (none of {', '.join(COMPILERS)})", WHAT_WORKS)


def run(command: list[str]) -> str:
    """What a compiler prints. Raises InvalidOption, with the compiler's first error, if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as error:
        raise refusal(f"the compiler {command[0]} cannot be started ({error})", WHAT_WORKS) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        said = next((line for line in lines if "error" in line), lines[-1]).strip()
        raise refusal(f"the compiler {command[0]} fails ({said})", WHAT_WORKS)
    return done.stdout


def refusal(why: str, advice: str) -> InvalidOption:
    """The error for kernels that cannot be had here."""
    return InvalidOption(f"attention='c' is not possible: {why}. {advice}")
