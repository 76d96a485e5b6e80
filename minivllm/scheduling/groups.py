"""Chapter 6: what becomes of a group of sequences after a step: they take their tokens, fork and end.

The first sequence of a group computes what all have in common. When that is done, the others are forked from
it: they get its block table, not a copy of its keys and values.
"""

from __future__ import annotations

from minivllm.scheduling.request import Request
from minivllm.scheduling.request_memory import RequestMemory
from minivllm.scheduling.sequence import Sequence


def take_tokens(memory: RequestMemory, request: Request, tokens: dict[Sequence, int]) -> None:
    """Sequences take their tokens; those that end with it give back their memory."""
    first, ready = request.first, may_fork(request)
    for sequence, token in tokens.items():
        request.append(sequence, token)
    if ready:
        fork_all(memory, request, first)
    for sequence in tokens:
        if sequence.finish_reason is not None:
            memory.free(sequence)


def may_fork(request: Request) -> bool:
    """Whether the first sequence of a group has computed what all have in common."""
    return not request.forked and request.first.num_computed_tokens == request.num_common_tokens


def fork_all(memory: RequestMemory, request: Request, first: Sequence) -> None:
    """All that go on get what the first has."""
    for sequence in request.live:
        if sequence is not first:
            memory.fork(request, first, sequence)
    memory.parted(request, first)


def take_beams(memory: RequestMemory, request: Request, branches: list[tuple[int, int]]) -> None:
    """The live beams become these: (row of its parent, token), best first; none: the search is over."""
    assert request.search is not None
    parents, used, live = request.live, set(), []
    for row, _ in branches:
        sequence = parents[row]
        if row in used:  # a beam that goes on in several ways: forked before it takes its token
            sequence = request.branch(parents[row])
            memory.fork(request, parents[row], sequence)
        used.add(row)
        live.append(sequence)
    for row, sequence in enumerate(parents):
        if row not in used:
            memory.free(sequence)
    for sequence, (_, token) in zip(live, branches, strict=True):
        sequence.append(token)
    memory.parted(request, parents[0])
    if request.search.done:
        request.finish(request.search.best()[0].finish_reason)
    else:
        request.sequences = request.live = live
