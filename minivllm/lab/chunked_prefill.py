"""Above the chapters: what a long prompt does to those who are decoding, by the token budget of a step.

    python -m minivllm.lab.chunked_prefill --out DIR

A step that takes a whole prompt makes all who decode wait for it; with a budget they wait for a chunk:

    whole prompts    |d|d|d|dPPPPPPPPPPPPPPP|d|d|d|       one gap is long
    a budget         |d|d|dPPP|dPPP|dPPP|dPPP|dPPP|d|     none is

    | ... |: a step; d: a token of each request that decodes; P: tokens of the prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from minivllm.cli.options import FiniteRange
from minivllm.errors import MinivllmError
from minivllm.lab.chunked_load import Load, measure, ratios
from minivllm.lab.curves import Results, about, curve_options, in_miniature, load_model, whole_numbers
from minivllm.lab.tables import table

NAME = "chunked_prefill"
CLAIM = {"max_num_batched_tokens": 128, "itl_p99_ratio": 3.0, "throughput_ratio": 0.9}
QUICK = {"model": "random:tiny-llama", "seconds": 1.2, "interval": 0.2, "decode_prompt_len": 32}
MOST_PROMPTS = 100_000
WHOLE: dict[str, Any] = {"scheduler": "continuous"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@curve_options
@click.option(
    "--budgets", default="64,128,256,512,1024,2048", show_default=True, help="max_num_batched_tokens."
)
@click.option(
    "--decodes", "num_decodes", type=click.IntRange(1), default=8, show_default=True, help="That always run."
)
@click.option(
    "--decode-prompt-len",
    type=click.IntRange(1),
    default=1536,
    show_default=True,
    help="Tokens that these begin with.",
)
@click.option(
    "--prompt-len", type=click.IntRange(1), default=700, show_default=True, help="Of each that arrives."
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=16, show_default=True, help="Output for each of these."
)
@click.option(
    "--interval",
    type=FiniteRange(0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds between arrivals.",
)
@click.option(
    "--seconds", type=FiniteRange(0, min_open=True), default=20.0, show_default=True, help="Of a point."
)
def main(out: Path, quick: bool, attention: str | None, budgets: str, **chosen: Any) -> None:
    """Requests decode while long prompts arrive: measured by the budget of a step, and with whole prompts.

    Results and picture go to OUT/chunked_prefill.json and .png. Times are this machine's; only points of one
    run can be compared. The last line compares a budget of 128 with whole prompts.
    """
    if quick:
        chosen = in_miniature(chosen, QUICK)
    source = {name: chosen.pop(name) for name in ("model", "dtype", "device")}
    sizes = whole_numbers(budgets, "--budgets")
    if chosen["interval"] >= chosen["seconds"]:
        raise click.BadParameter("Nothing arrives: it must be less than --seconds.", param_hint="--interval")
    if chosen["seconds"] / chosen["interval"] > MOST_PROMPTS:
        raise click.BadParameter(
            f"More than {MOST_PROMPTS:,} prompts would arrive: give a larger one, or fewer --seconds.",
            param_hint="--interval",
        )
    try:
        found = run(out, source, sizes, Load(**chosen), attention)
    except (MinivllmError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(as_table(found))
    click.echo(verdict(found["rows"]))


def run(
    folder: Path, source: Mapping[str, str], budgets: Sequence[int], load: Load, attention: str | None = None
) -> dict[str, Any]:
    """Measure every point, whole prompts first; returns what the file holds.

    Raises MinivllmError, OSError.
    """
    from minivllm.llm import LLM

    decoder, tokenizer = load_model(**source)
    found = about(decoder, source["model"]) | {"load": asdict(load), "claim": CLAIM}
    results = Results(folder, NAME, found)
    whole: dict[str, Any] = {}
    for budget in (None, *budgets):
        options = WHOLE if budget is None else {"scheduler": "chunked", "max_num_batched_tokens": budget}
        with LLM(decoder, tokenizer=tokenizer, attention=attention, **options) as llm:
            row = {"max_num_batched_tokens": budget, **options, **measure(llm, load)}
            results.found["attention"] = llm.args.attention
        whole = whole or row
        results.add("rows", {**row, **ratios(row, whole)})
        results.say(f"{_name(row)}: {row['steps']} steps, {row['arrived']} prompts arrived")
    results.draw("draw_chunked_prefill")
    return results.found


def as_table(found: Mapping[str, Any]) -> str:
    """The rows as text, latencies in milliseconds."""
    rows = [
        {
            "tokens in a step": _name(row),
            **{f"ITL {name}": row["itl_ms"][name] for name in ("p50", "p99", "max")},
            "TTFT p50": row["ttft_ms"]["p50"],
            "tokens/s": row["tok_s"],
            "queue grew": "yes" if row["queue_grew"] else "no",
        }
        for row in found["rows"]
    ]
    forms = {name: ",.0f" if name == "tokens/s" else ",.1f" for name in list(rows[0])[1:-1]}
    text = {"tokens in a step": None, **forms, "queue grew": None}
    return f"{found['model']}, {found['dtype']}, {found['device']}\n{table(rows, text)}"


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The two ratios of the claim's budget, each beside what it should be at least.

    A p99 is blind to gaps that are fewer than one in a hundred: to a prompt every two seconds beside steps of
    less than 20 ms. Where the longest gap of whole prompts is far beyond their p99, it is compared, too.
    """
    budget = CLAIM["max_num_batched_tokens"]
    row = next((row for row in rows if row["max_num_batched_tokens"] == budget), None)
    if row is None or row["itl_p99_ratio"] is None or row["throughput_ratio"] is None:
        return f"Budget {budget}: not measured."
    said = (
        f"Budget {budget} against whole prompts: ITL p99 {_times(row['itl_p99_ratio'])} (wanted of a real "
        f"model: {CLAIM['itl_p99_ratio']:g} times lower), throughput {row['throughput_ratio']:.3f} of theirs "
        f"(wanted: {CLAIM['throughput_ratio']:g})."
    )
    whole = rows[0]
    if whole["itl_ms"]["max"] > 1.5 * whole["itl_ms"]["p99"]:
        share = whole["prompt_steps"] / whole["steps"]
        said += (
            f" With whole prompts {share:.1%} of the steps held a prompt, too few for the p99 to see them. "
            f"The longest gap is {row['itl_max_ratio']:.2f} times shorter; the p99 shows it at a lower "
            "--interval or a higher --decode-prompt-len."
        )
    return said


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times lower" if ratio >= 1 else f"{1 / ratio:.2f} times higher"


def _name(row: Mapping[str, Any]) -> str:
    return str(row["max_num_batched_tokens"] or "whole prompts")


if __name__ == "__main__":
    main()
