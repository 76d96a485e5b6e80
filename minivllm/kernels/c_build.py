"""Chapter 8: the C kernels, compiled by the system's own compiler when they are first asked for.

What the compiler makes is kept in the user's cache folder, and found there by its name: a hash of the
sources, the flags, and what the compiler says of itself and of this CPU. So another compiler, another kind of
machine on the same disk, or an edited source gets a file of its own. A file under its final name is whole,
since it arrives there by one rename; processes that start at once compile it once.
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
    target = folder / f"c_paged-{digest.hexdigest()[:16]}.so"
    try:
        if not target.exists():
            compile_into(target, command, files[: len(SOURCES)])
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise refusal(
            f"{target} cannot be written or loaded ({error})",
            "Give that folder space and the right to write, or set MINIVLLM_HOME to another folder; a file "
            "that is damaged may be deleted. Or take attention='torch'.",
        ) from error


def compile_into(target: Path, command: list[str], sources: list[Path]) -> None:
    """Compile to a shared library, unless another process is faster. Raises OSError and InvalidOption."""
    from filelock import FileLock  # here: 0.1 s to import, and what is on disk needs no lock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if target.exists():
            return
        with TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            made = Path(scratch, target.name)
            run([*command, "-shared", *map(str, sources), "-o", str(made)])
            if not made.exists():
                raise refusal(f"the compiler {shlex.join(command[:1])} made no file", WHAT_WORKS)
            os.replace(made, target)


def find_compiler() -> list[str]:
    """The command in CC, or else the first of COMPILERS that is there. Raises InvalidOption without any."""
    if named := shlex.split(os.environ.get("CC", "")):
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
