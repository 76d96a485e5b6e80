"""Above the chapters: what one scheduling step costs, by running requests and by the size of the pool.

    python -m minivllm.lab.scheduling_cost

No tensor is involved. Each request grows by a token a step; the median of many steps is taken.
"""

from __future__ import annotations

import json
import statistics
import time

import click

from minivllm.memory.paged import PagedManager
from minivllm.params import SamplingParams
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.request import Request

BLOCK_SIZE = 16
PROMPT_LEN = 32


def running_scheduler(num_running: int, num_blocks: int, steps: int) -> ContinuousScheduler:
    """A scheduler with so many requests running, each with room to grow for so many steps."""
    manager = PagedManager(num_blocks, BLOCK_SIZE, bytes_per_token=1)
    scheduler = ContinuousScheduler(manager, max_num_seqs=num_running)
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
    for i in range(num_running):
        scheduler.add(Request(i, range(PROMPT_LEN), params))
    scheduler_step(scheduler)
    assert len(scheduler.running) == num_running
    return scheduler


def scheduler_step(scheduler: ContinuousScheduler) -> None:
    """Plan a step and take a token for each request in it."""
    output = scheduler.schedule()
    scheduler.update(output, {part.sequence.seq_id: 1 for part in output.scheduled})


def step_seconds(num_running: int, num_blocks: int, steps: int = 64) -> float:
    """Median seconds of one step, of this thread's own time: another program's does not count."""
    scheduler = running_scheduler(num_running, num_blocks, steps)
    times = []
    for _ in range(steps):
        start = time.thread_time()
        scheduler_step(scheduler)
        times.append(time.thread_time() - start)
    return statistics.median(times)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Print the cost of a step as JSON lines: first by running requests, then by blocks in the pool."""
    for num_running, num_blocks in ((16, 2**14), (64, 2**14), (256, 2**14), (1024, 2**14)):
        _print(num_running, num_blocks)
    for num_blocks in (2**10, 2**14, 2**18, 2**20):
        _print(64, num_blocks)


def _print(num_running: int, num_blocks: int) -> None:
    micro = 1e6 * step_seconds(num_running, num_blocks)
    click.echo(
        json.dumps(
            {
                "running": num_running,
                "num_blocks": num_blocks,
                "step_us": round(micro, 1),
                "us_per_request": round(micro / num_running, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
