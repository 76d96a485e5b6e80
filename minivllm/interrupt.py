"""Above the chapters: Ctrl-C waits where half a change would be left behind.

with shield:                  # Ctrl-C is noted
    plan()
    with shield.lowered():    # here it raises KeyboardInterrupt at once
        compute()
    take()
# a noted one raises here
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Shield:
    """Holds SIGINT back while a block runs, in the main thread, where Python handles it; it may be nested."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None  # what handled SIGINT before
        self._pending: tuple[Any, ...] | None = None

    def __enter__(self) -> Shield:
        if self._depth == 0 and self._can_hold():
            self._handler = signal.signal(signal.SIGINT, self._note)
        self._depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            signal.signal(signal.SIGINT, handler)
            self._raise_noted(handler)

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Let Ctrl-C through while this block runs, one noted before it first."""
        if self._handler is None:
            yield
            return
        signal.signal(signal.SIGINT, self._handler)
        try:
            self._raise_noted(self._handler)
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *arguments: Any) -> None:
        self._pending = arguments

    def _raise_noted(self, handler: Any) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            handler(*pending)

    def _can_hold(self) -> bool:
        main = threading.current_thread() is threading.main_thread()
        return main and callable(signal.getsignal(signal.SIGINT))
