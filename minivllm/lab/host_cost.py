"""Above the chapters: what the host does in a step beside the model, and how it grows.

python -m minivllm.lab.host_cost                           by running requests, blocks, waiting requests
python -m minivllm.lab.host_cost --model smollm2-135m      its share of a real model's steps
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import click

from minivllm.cli.options import DTYPES, FiniteRange
from minivllm.errors import MinivllmError
from minivllm.lab.bench.result import device_name
from minivllm.lab.host_step import MAX_STEPS, add_requests, host_step, still_engine
from minivllm.lab.prefix_cost import Stopwatch
from minivllm.llm import LLM

RUNNING = (1, 2, 8, 32, 128, 256, 512)
POOLS = (10**3, 10**4, 10**5, 10**6)
WAITING = (0, 1, 100, 1000, 10_000)


def host_share(llm: LLM, num_running: int, steps: int, temperature: float = 0) -> dict[str, Any]:
    """The host half's part of the steps in which so many requests of a real model decode.

    host: this thread's time in a step less that inside the model and the sampler, which are PyTorch's.
    """
    engine = llm.engine
    add_requests(llm, num_running, temperature, prompt_len=1)  # a long prompt takes long, and is not measured
    while engine.scheduler.waiting or any(r.num_tokens == len(r.prompt_token_ids) for r in _running(llm)):
        llm.step()
    assert len(_running(llm)) == num_running
    engine.forward = engine.forward or engine.model
    torch_half = Stopwatch(engine, ("forward", "_sample", "_search"), time.thread_time)
    thread, start = time.thread_time(), time.perf_counter()
    for _ in range(steps):
        llm.step()
    step = (time.perf_counter() - start) / steps
    host = (time.thread_time() - thread - torch_half.seconds) / steps
    return {
        "running": num_running,
        "step_us": round(1e6 * step, 1),
        "host_us": round(1e6 * host, 1),
        "us_per_request": round(1e6 * host / num_running, 2),
        "share": round(host / step, 5),
    }


def _running(llm: LLM) -> list[Any]:
    return llm.engine.scheduler.running


def cases(by: Sequence[str]) -> list[tuple[int, int, int]]:
    """(running requests, blocks, waiting requests) of each line."""
    found = {
        "running": [(n, 10**5, 0) for n in RUNNING],
        "pool": [(64, num_blocks, 0) for num_blocks in POOLS],
        "waiting": [(64, 10**4, n) for n in WAITING],
    }
    return [case for name in by for case in found[name]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--by", type=click.Choice(["running", "pool", "waiting"]), multiple=True, help="Default: all.")
@click.option("--prefix-cache", is_flag=True, help="Memory with a prefix cache.")
@click.option("--steps", type=click.IntRange(1, MAX_STEPS - 1), default=48, show_default=True)
@click.option("--model", help="The share of this model's steps, instead.")
@click.option("--running", type=click.IntRange(1), default=256, show_default=True, help="With --model.")
@click.option("--temperature", type=FiniteRange(0), default=0.0, show_default=True, help="With --model.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="With --model.")
@click.option("--device", default="auto", show_default=True, help="With --model.")
def main(by: tuple[str, ...], prefix_cache: bool, steps: int, model: str | None, **real: Any) -> None:
    """Print what the host half of a step costs, as JSON lines: median microseconds of this thread."""
    if model is not None:
        n, options = real["running"], {"dtype": real["dtype"], "device": real["device"]}
        try:
            with LLM(
                model, max_num_seqs=n, max_model_len=512, enable_prefix_caching=prefix_cache, **options
            ) as llm:
                about = {"model": model, "device": device_name(llm.engine.model.device)}
                click.echo(json.dumps(about | host_share(llm, n, steps, real["temperature"])))
        except MinivllmError as error:
            raise click.ClickException(str(error)) from error
        return
    for num_running, num_blocks, num_waiting in cases(by or ("running", "pool", "waiting")):
        found = host_step(still_engine(num_running, num_blocks, num_waiting, prefix_cache), steps)
        size = {"running": num_running, "num_blocks": num_blocks, "waiting": num_waiting}
        each = {"us_per_request": round(found.step_us / num_running, 2)}
        click.echo(json.dumps(size | vars(found) | each))


if __name__ == "__main__":
    main()
