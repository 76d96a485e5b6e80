"""Chapter 6: who waits, and who is next: first come first served, or by priority.

A request that was preempted goes back to where it belongs: to the head of the line, or before all that
are less urgent or came later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from minivllm.scheduling.request import Request


class WaitingQueue(Protocol):
    """Requests in the order in which they are to be admitted."""

    def append(self, request: Request, /) -> None:
        """A request that has arrived."""
        ...

    def appendleft(self, request: Request, /) -> None:
        """A request that was running, and is to be the first of those that came after it."""
        ...

    def popleft(self) -> Request:
        """Take the next one."""
        ...

    def remove(self, request: Request, /) -> None:
        """Take this one, wherever it stands."""
        ...

    def __getitem__(self, at: int, /) -> Request: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


def rank(request: Request) -> tuple[int, int]:
    """The order under priority: the lower number first, of equals the one that came first."""
    return (request.priority, request.arrival)


class PriorityQueue:
    """A heap by `rank`; a step costs O(log waiting)."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []

    def append(self, request: Request) -> None:
        """Put a request where it belongs."""
        heapq.heappush(self._heap, (rank(request), request))

    appendleft = append

    def popleft(self) -> Request:
        """Take the most urgent."""
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        """Take this one out. Raises ValueError where it is not."""
        self._heap.remove((rank(request), request))
        heapq.heapify(self._heap)

    def __getitem__(self, at: int) -> Request:
        return self._heap[0][1] if at == 0 else sorted(self._heap)[at][1]

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap))


POLICIES: dict[str, Callable[[], WaitingQueue]] = {"fcfs": deque, "priority": PriorityQueue}
