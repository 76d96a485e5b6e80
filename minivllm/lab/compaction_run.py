"""Above the chapters: one compaction in the middle of a run of the model: what moved, and how fast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minivllm.engine_args import EngineArgs
from minivllm.engine_parts import build_engine
from minivllm.errors import InvalidOption
from minivllm.lab.workload import WorkloadRequest
from minivllm.memory.contiguous import ContiguousManager, ContiguousSnapshot, Move
from minivllm.memory.contiguous_store import ContiguousStore
from minivllm.model.decoder import Decoder
from minivllm.params import SamplingParams
from minivllm.scheduling.request import Request


@dataclass(frozen=True)
class CompactionRun:
    """outputs: each request's tokens. before, after: the memory around the compaction. moved_bytes: copied.

    move_seconds: the median of several times the same copying. step_seconds: the median of all steps of the
    run. num_steps: how many the run took.
    """

    outputs: list[list[int]]
    before: ContiguousSnapshot
    after: ContiguousSnapshot
    moves: tuple[Move, ...]
    moved_bytes: int
    move_seconds: float
    step_seconds: float
    num_steps: int


def run_and_compact(
    model: Decoder,
    workload: Sequence[WorkloadRequest],
    *,
    num_slots: int,
    after_step: int,
    reservation: str = "oracle",
    compact: bool = True,
) -> CompactionRun:
    """Serve requests in contiguous memory and compact it once, after so many steps, or never.

    Requests join as soon as there is room. compact=False only looks, so that the two can be compared.
    Raises InvalidOption where the run is over by then.
    """
    args = EngineArgs(
        cache="contiguous",
        scheduler="continuous",
        reservation=reservation,
        max_model_len=num_slots,
        kv_cache_memory_bytes=num_slots * model.config.kv_elements_per_token * model.dtype.itemsize,
    )
    seconds: list[float] = []
    engine = build_engine(model, args, on_step=lambda step: seconds.append(step.end - step.start))
    manager, store = engine.manager, engine.store
    assert isinstance(manager, ContiguousManager)
    assert isinstance(store, ContiguousStore)
    requests = []
    for i, w in enumerate(workload):
        params = SamplingParams(temperature=0, max_tokens=w.max_tokens, ignore_eos=True)
        requests.append(Request(i, w.token_ids, params, max_model_len=num_slots))
        engine.add(requests[-1])
    for _ in range(after_step):
        engine.step()
    if not engine.has_unfinished():
        raise InvalidOption(f"after_step={after_step} is not possible: the run is over by then.")
    before, moves, moved, move_seconds = manager.snapshot(), list[Move](), 0, 0.0
    if compact:
        moves = manager.compact()
        move_seconds = _time_moves(store, moves)
        moved = store.move(moves)
    after = manager.snapshot()
    while engine.has_unfinished():
        engine.step()
    return CompactionRun(
        [r.output_token_ids for r in requests],
        before,
        after,
        tuple(moves),
        moved,
        move_seconds,
        statistics.median(seconds),
        engine.num_steps,
    )


def _time_moves(store: ContiguousStore, moves: Sequence[Move], repeats: int = 5) -> float:
    """Seconds of the moves, without their effect: the pool is put back each time."""
    pool, seconds = store.kv.clone(), []
    for _ in range(repeats):
        _wait(store.kv.device)
        start = time.perf_counter()
        store.move(moves)
        _wait(store.kv.device)
        seconds.append(time.perf_counter() - start)
        store.kv.copy_(pool)
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
