"""Above the chapters: what a prefix cache costs: the time inside hashing, finding and registering.

It is measured as time inside these calls, beside the time of the steps that they belong to. So the answer
does not depend on the difference of two noisy runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click

from minivllm.cli.options import model_options
from minivllm.lab.bench.result import device_name
from minivllm.llm import LLM
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.params import SamplingParams

CALLS = ("match", "can_begin", "register", "num_registered")


class Stopwatch:
    """Adds up the seconds inside some methods of an object, on a clock."""

    def __init__(self, owner: Any, names: tuple[str, ...], clock: Callable[[], float] = time.perf_counter):
        self.seconds = 0.0
        self._clock = clock
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = self._clock()
            try:
                return method(*arguments)
            finally:
                self.seconds += self._clock() - start

        return timed


def prefix_cost(llm: LLM, num_requests: int, shared: int, own: int, max_tokens: int) -> dict[str, Any]:
    """Run requests that share their first tokens; seconds of all steps, and of those inside the prefix cache.

    shared, own: prompt tokens that all have in common, and that one has for itself.
    """
    manager = llm.engine.manager
    assert isinstance(manager, PrefixCachingManager)
    vocab = llm.engine.model.config.vocab_size
    inside = Stopwatch(manager, CALLS)
    steps = Stopwatch(llm.engine, ("step",))
    common = [7 * i % vocab for i in range(shared)]
    prompts = [
        {"prompt_token_ids": [*common, *((11 * i + 13 * k + 5) % vocab for i in range(own))]}
        for k in range(num_requests)
    ]
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False
    )
    return {
        "step_seconds": round(steps.seconds, 9),
        "inside_seconds": round(inside.seconds, 9),
        "share": round(inside.seconds / steps.seconds, 6),
        "token_hit_rate": manager.stats.token_hit_rate,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@model_options
@click.option("--num-requests", type=click.IntRange(1), default=8, show_default=True)
@click.option("--shared", type=click.IntRange(0), default=128, show_default=True, help="Tokens in common.")
@click.option("--own", type=click.IntRange(1), default=32, show_default=True, help="Further prompt tokens.")
@click.option("--max-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens of output.")
def main(model: str, dtype: str, device: str, **sizes: int) -> None:
    """Print the share of step time inside the prefix cache, as JSON lines: by hash, then by radix tree."""
    for index in ("hash", "radix"):
        with LLM(model, dtype=dtype, device=device, prefix_cache=index, max_model_len=1024) as llm:
            found = prefix_cost(llm, **sizes)
            about = {"index": index, "model": model, "device": device_name(llm.engine.model.device)}
        click.echo(json.dumps(about | found))


if __name__ == "__main__":
    main()
