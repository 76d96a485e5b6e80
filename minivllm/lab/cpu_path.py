"""Above the chapters: what each part of the fast path on a CPU brings, measured beside the step before it.

    python -m minivllm.lab.cpu_path --out DIR

Each setup differs from the one above it in one thing. All take their turns in every round, so that a machine
that is busy for a while is busy for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minivllm.errors import MinivllmError
from minivllm.lab.curves import QUICK_MODEL, Results, about, curve_options, in_miniature, whole_numbers
from minivllm.lab.tables import table

if TYPE_CHECKING:
    from minivllm.llm import LLM

QUICK = {"model": QUICK_MODEL, "running": "1,4", "context": 32, "rounds": 2}
# name -> the options that make it
SETUPS: dict[str, dict[str, Any]] = {
    "as chapters 0 and 3 write it": {"attention": "reference", "enforce_eager": True},
    "attention in groups": {"attention": "torch", "enforce_eager": True},
    "weights packed": {"attention": "torch", "enforce_eager": False},
    "attention and rows in C": {"attention": "c", "enforce_eager": False},
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@curve_options
@click.option("--running", default="1,16,64", show_default=True, help="Requests that decode.")
@click.option("--context", type=click.IntRange(7), default=256, show_default=True, help="Tokens of each.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
def main(out: Path, quick: bool, **chosen: Any) -> None:
    """Time decode steps as the chapters write them, and with each part of the fast path added.

    Results go to OUT/cpu_path.json. Times are this machine's; only setups of one run can be compared.
    --attention is not used.
    """
    if quick:
        chosen = in_miniature(chosen, QUICK)
    counts = whole_numbers(chosen["running"], "--running")
    try:
        found = measure(out, chosen["model"], chosen["dtype"], counts, chosen["context"], chosen["rounds"])
    except (MinivllmError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(as_text(found))


def measure(
    out: Path, model: str, dtype: str, counts: list[int], context: int, rounds: int
) -> Mapping[str, Any]:
    """What the command finds: a row for each setup and number of requests, medians over the rounds."""
    from minivllm.lab.growth_points import decode_point

    engines = _engines(model, dtype, counts, context)
    first = next(iter(engines.values()))
    results = Results(out, "cpu_path", about(first.engine.model, model) | {"context": context})
    for num_seqs in counts:
        points: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds):
            results.say(f"{num_seqs} requests, round {number + 1} of {rounds}")
            for name, llm in engines.items():
                points[name].append(decode_point(llm, num_seqs, context)["step_ms"])
        before: list[float] = []
        for name, times in points.items():
            gain = statistics.median(b / a for b, a in zip(before or times, times, strict=True))
            row = {"running": num_seqs, "setup": name, "step_ms": statistics.median(times), "gain": gain}
            results.add("setups", row)
            before = times
    return results.found


def _engines(model: str, dtype: str, counts: list[int], context: int) -> dict[str, LLM]:
    """An engine for each setup; weights are loaded twice, plain and to be packed."""
    from minivllm.lab import curves
    from minivllm.lab.growth_points import blocks_needed, fill_pool
    from minivllm.llm import LLM

    engines = {}
    decoders = {eager: curves.load_model(model, dtype, "cpu") for eager in (True, False)}
    num_blocks = blocks_needed(max(counts), context, 16) + 1
    for name, options in SETUPS.items():
        decoder, tokenizer = decoders[options["enforce_eager"]]
        engines[name] = LLM(
            decoder,
            tokenizer=tokenizer,
            max_model_len=context + 1,
            num_blocks=num_blocks,
            max_num_seqs=max(counts),
            watermark=0.0,
            **options,
        )
        fill_pool(engines[name], num_blocks)
    return engines


def as_text(found: Mapping[str, Any]) -> str:
    """The setups as a table; gain: how many times as fast as the setup above, in the same round."""
    forms = {"running": None, "setup": None, "step_ms": ",.2f", "gain": ".2f"}
    head = f"{found['model']}, {found['dtype']}, {found['device']}, context {found['context']}"
    return f"{head}\n\n{table(found['setups'], forms)}"


if __name__ == "__main__":
    main()
