"""Above the chapters: a fresh Jupyter kernel of the running Python that runs a reader's cells, one by one.

with Kernel(folder, seconds=120) as kernel:
    failure = kernel.run("1 / 0")     # None when the cell ran through
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minivllm
from minivllm.course import kernel_probe
from minivllm.errors import MinivllmError


@contextmanager
def _without(module: str) -> Iterator[None]:
    """While the block imports, this module cannot be had, unless it is there already."""
    spared = module not in sys.modules
    if spared:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if spared:
            del sys.modules[module]


try:
    # jsonschema, which nbformat brings, would have rfc3987_syntax check IRIs. A notebook has none, and to
    # build its grammar takes seconds; jsonschema does without it.
    with _without("rfc3987_syntax"):
        from ipykernel.kernelspec import make_ipkernel_cmd
        from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
        from jupyter_client.manager import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import DeadKernelError
        from nbformat import v4
except ImportError as missing:
    raise MinivllmError(
        f"Notebooks cannot be run here: {missing}. That takes the packages of the extra `lab`: `make env` "
        "installs them, and so does `pip install -e '.[lab]'`."
    ) from missing

EMPTY = "#~\n"  # stands for an empty line at the start of a cell
PATIENCE = 5  # seconds that the kernel has to say where a cell failed or was interrupted


class KernelNotStarted(MinivllmError, RuntimeError):
    """No kernel came up."""


@dataclass(frozen=True)
class Place:
    """A line of the reader's: in a cell (its whole text in source), or in a file (its name), or in neither:
    then it breaks the syntax of the very cell that was to be run."""

    line: int
    text: str
    source: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class Failure:
    """How a cell failed. kind: "error"; or "timeout" or "died", and then the kernel is of no use any more.

    name, message: the error's. places: the reader's own lines that it passed, outermost first.
    """

    kind: str
    name: str = ""
    message: str = ""
    places: tuple[Place, ...] = ()


class Kernel:
    """One kernel, from `with` to its end; what cells print and draw is dropped."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.seconds = seconds
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)  # a cell that is given up leaves tasks
        self._manager = AsyncKernelManager(kernel_spec_manager=_ThisPython())
        self._client = _Client(
            v4.new_notebook(cells=[v4.new_code_cell()]),
            km=self._manager,
            allow_errors=True,
            store_widget_state=False,
            on_cell_executed=self._note,
        )
        self._reply: dict[str, Any] = {}

    def __enter__(self) -> Kernel:
        try:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            start = self._client.async_start_new_kernel(cwd=str(self._folder), env=_environment(), **quiet)
            self._await(start)
            self._await(self._client.async_start_new_kernel_client())
        except (RuntimeError, OSError) as error:
            self.__exit__()
            raise KernelNotStarted(
                f"No Python kernel started in {self._folder}: {error}. A file there that is named like one "
                "of Python's own modules can be the cause; `minivllm doctor` looks at the rest."
            ) from error
        except BaseException:
            self.__exit__()
            raise
        # nobody reads the kernel's own tracebacks, and long ones take seconds
        self._await(self._execute("%xmode Minimal"))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._manager.has_kernel:
            self._await(self._manager.shutdown_kernel(now=True))
        if self._client.kc is not None:
            self._client.kc.stop_channels()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._await(_all(left))
        self._loop.close()

    def run(self, source: str) -> Failure | None:
        """Run one cell; None when it ran through."""
        text = with_its_first_lines(source)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a pair of surrogates: it cannot be sent to a kernel
            line = text.count("\n", 0, error.start)
            place = Place(line + 1, text.split("\n")[line].strip())
            return Failure("error", type(error).__name__, str(error), (place,))
        return self._await(self._run(text))

    async def _run(self, source: str) -> Failure | None:
        self._reply = {}
        cell = asyncio.ensure_future(self._execute(source))
        if not (await asyncio.wait({cell}, timeout=self.seconds))[0]:
            await self._manager.interrupt_kernel()
            ended = (await asyncio.wait({cell}, timeout=PATIENCE))[0]
            return Failure("timeout", places=await self._places() if ended else ())
        if cell.exception() is not None:
            if isinstance(cell.exception(), DeadKernelError):
                return Failure("died")
            await cell
        if any(item.get("source") == "ask_exit" for item in self._reply.get("payload") or ()):
            return Failure("died")  # exit() and quit() end it a moment later
        if self._reply.get("status") != "error":
            return None
        name, message = self._reply.get("ename", "Error"), self._reply.get("evalue", "")
        return Failure("error", name, message, await self._places())

    async def _execute(self, source: str) -> Any:
        return await self._client.async_execute_cell(v4.new_code_cell(source), 0)

    def _note(self, cell: Any, cell_index: int, execute_reply: dict[str, Any]) -> None:
        self._reply = execute_reply["content"]

    async def _places(self) -> tuple[Place, ...]:
        """The reader's lines where it failed last; () when the kernel does not say."""
        try:
            cell = await asyncio.wait_for(self._execute(kernel_probe.SOURCE), PATIENCE)
        except (TimeoutError, DeadKernelError):
            return ()
        found = [output["data"][kernel_probe.MIME] for output in cell.outputs]
        return tuple(Place(**place) for place in found[0]) if found else ()

    def _await(self, work: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(work)


def with_its_first_lines(source: str) -> str:
    """A cell with comments for its first empty lines: IPython drops those, and then counts lines wrongly."""
    text = source.lstrip("\n")
    return source if text.startswith("%%") else EMPTY * (len(source) - len(text)) + text


def _environment() -> dict[str, str]:
    """As here; a package that runs from its clone and is not installed is found by the kernel too."""
    root = Path(minivllm.__file__).resolve().parent.parent
    if root.name in ("site-packages", "dist-packages"):
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else str(root)}


async def _all(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class _ThisPython(KernelSpecManager):
    """Knows one kernel: the Python that runs now, whatever the notebook and the machine call "python3"."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(argv=make_ipkernel_cmd(), display_name="Python", language="python")


class _Client(NotebookClient):
    """Keeps nothing of what cells show, since a loop without end can print for minutes."""

    def output(self, outs: Any, msg: Any, display_id: Any, cell_index: int) -> Any:
        if kernel_probe.MIME in msg["content"].get("data", {}):
            return super().output(outs, msg, display_id, cell_index)
        return None
