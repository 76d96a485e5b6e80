"""Above the chapters: work in forked processes, so that what one breaks the others do not feel.

A kernel that reads where nothing is leaves its process without a usable GPU; one that never ends holds it for
ever. A process can be replaced, and what it sent before it broke is kept. A fork has all that its parent has
imported. But the parent must not have touched CUDA, which no fork can use after that.
"""

from __future__ import annotations

import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

LAST_WORDS = 600  # most characters of an error that are kept
SECONDS_TO_END = 10.0  # for a process that has sent all it has


@dataclass(frozen=True)
class Lost:
    """What stands for the rest of a share that did not come to its end, and why."""

    share: int
    why: str


def in_processes(
    work: Callable[[Any], Iterable[Any]], shares: Sequence[Any], seconds: float = math.inf
) -> Generator[Any, None, None]:
    """Run work(share) for every share at once, each in a process; yields what they yield, as it comes.

    A share that raises, whose process dies, or that is not done after so many seconds ends in a Lost.
    """
    context = multiprocessing.get_context("fork")
    ends, running = time.monotonic() + seconds, {}
    for number, share in enumerate(shares):
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=_send_all, args=(its, work, share), daemon=True)
        process.start()
        its.close()  # the process has the only one left: when it dies, mine ends
        running[mine] = number, process
    try:
        while running:
            left = None if math.isinf(ends) else max(0.0, ends - time.monotonic())
            ready = [end for end in wait(list(running), left) if isinstance(end, Connection)]
            for end in ready:
                number, process = running[end]
                try:
                    kind, value = end.recv()
                except (EOFError, OSError):
                    process.join(SECONDS_TO_END)
                    kind, value = "lost", f"its process died (exit code {process.exitcode})"
                if kind == "item":
                    yield value
                    continue
                del running[end]
                process.join(SECONDS_TO_END)
                process.kill()
                if kind == "lost":
                    yield Lost(number, value)
            if not ready:
                yield from (Lost(number, f"stopped after {seconds:.0f} s") for number, _ in running.values())
                return
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _send_all(end: Connection, work: Callable[[Any], Iterable[Any]], share: Any) -> None:
    try:
        for item in work(share):
            end.send(("item", item))
        end.send(("done", None))
    except BaseException as error:  # whatever it is: it ends this process alone
        traceback.print_exc()
        end.send(("lost", last_words(error)))


def last_words(error: BaseException) -> str:
    """An error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LAST_WORDS]
