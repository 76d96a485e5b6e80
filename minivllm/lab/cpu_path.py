"""Above the chapters: what each part of the fast path on a CPU brings, measured beside the step before it.

    python -m minivllm.lab.cpu_path --out DIR

Each setup differs from the one above it in one thing. All take their turns in every round, so that a machine
that is busy for a while is busy for all of them. The products alone come after that, by oneDNN and in C.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from minivllm.errors import InvalidOption, MinivllmError
from minivllm.lab.curves import QUICK_MODEL, Results, about, curve_options, in_miniature, whole_numbers
from minivllm.lab.tables import table

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.model.packed import PackedDecoder

QUICK = {"model": QUICK_MODEL, "running": "1,4", "rows": "1,7", "context": 32, "rounds": 2}
ONEDNN = "weights packed, by oneDNN"
# name -> the options that make it
SETUPS: dict[str, dict[str, Any]] = {
    "as chapters 0 and 3 write it": {"attention": "reference", "enforce_eager": True},
    "attention in groups": {"attention": "torch", "enforce_eager": True},
    ONEDNN: {"attention": "torch", "enforce_eager": False},
    "products, norm and rotary embedding in C": {"attention": "torch", "enforce_eager": False},
    "attention in C": {"attention": "c", "enforce_eager": False},
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@curve_options
@click.option("--running", default="1,16,64", show_default=True, help="Requests that decode.")
@click.option("--rows", default="1,4,16,64,512", show_default=True, help="Rows of the products alone.")
@click.option("--context", type=click.IntRange(7), default=256, show_default=True, help="Tokens of each.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
def main(out: Path, quick: bool, **chosen: Any) -> None:
    """Time decode steps as the chapters write them, and with each part of the fast path added; then the
    products of a step alone, by oneDNN and in C.

    Results go to OUT/cpu_path.json. Times are this machine's; only setups of one run can be compared.
    --attention is not used.
    """
    if quick:
        chosen = in_miniature(chosen, QUICK)
    counts = whole_numbers(chosen["running"], "--running")
    rows = whole_numbers(chosen["rows"], "--rows")
    kind = chosen["model"], chosen["dtype"]
    if chosen["device"] not in ("auto", "cpu"):
        raise click.BadParameter(
            f"{chosen['device']} is not possible: it measures a CPU.", param_hint="--device"
        )
    try:
        found = measure(out, *kind, counts, rows, chosen["context"], chosen["rounds"])
    except (MinivllmError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(as_text(found))


def measure(
    out: Path, model: str, dtype: str, counts: list[int], rows: list[int], context: int, rounds: int
) -> Mapping[str, Any]:
    """What the command finds: a row for each setup and number of requests, and one of the products for each
    number of rows; medians over the rounds."""
    from minivllm.lab.growth_points import decode_point
    from minivllm.model.packed import PackedDecoder

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
    packed = (llm.engine.forward for llm in (engines[ONEDNN], list(engines.values())[-1]))
    decoders = [decoder for decoder in packed if isinstance(decoder, PackedDecoder)]
    assert len(decoders) == 2
    for num_rows in rows:
        results.say(f"products of {num_rows} rows")
        spans = [[_products(decoder, num_rows) for decoder in decoders] for _ in range(1 + rounds)][1:]
        onednn, ours = (1e3 * statistics.median(column) for column in zip(*spans, strict=True))
        gain = statistics.median(before / after for before, after in spans)
        row = {"rows": num_rows, "onednn_ms": onednn, "c_ms": ours, "gain": gain}
        results.add("products", row)
    return results.found


def _products(decoder: PackedDecoder, num_rows: int) -> float:
    """Seconds that all products of a step take, the output layer's too, one after the other as in a step."""
    linears = [(x.qkv, x.out, x.gate, x.up, x.down) for x in decoder.layers]
    config = decoder.model.config
    hidden, inner, attended = (
        torch.ones(num_rows, size, dtype=decoder.model.dtype)
        for size in (
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads * config.head_dim,
        )
    )
    start = time.perf_counter()
    with torch.inference_mode():
        for qkv, out, gate, up, down in linears:
            qkv(hidden), out(attended, "add", hidden), gate(hidden, "swish"), up(hidden, "mul", inner)
            down(inner, "add", hidden)
        decoder.lm_head(hidden)
    return time.perf_counter() - start


def _engines(model: str, dtype: str, counts: list[int], context: int) -> dict[str, LLM]:
    """An engine for each setup; weights are loaded twice, plain and to be packed in C."""
    from minivllm.lab import curves
    from minivllm.lab.growth_points import blocks_needed, fill_pool
    from minivllm.llm import LLM
    from minivllm.model.packed import PACKABLE, OneDNN, PackedDecoder

    engines = {}
    decoders = {eager: curves.load_model(model, dtype, "cpu") for eager in (True, False)}
    kind = decoders[True][0].dtype
    if kind not in PACKABLE:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in PACKABLE)
        raise InvalidOption(
            f"dtype={str(kind).removeprefix('torch.')} is not possible: weights are packed as {names}."
        )
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
        if name == ONEDNN:
            engines[name].engine.forward = PackedDecoder(decoder, products=OneDNN(), keep=True)
        fill_pool(engines[name], num_blocks)
    return engines


def as_text(found: Mapping[str, Any]) -> str:
    """Both tables. gain: how many times as fast as the setup above, or as oneDNN, in the same round."""
    forms = {"running": None, "setup": None, "step_ms": ",.2f", "gain": ".2f"}
    products = {"rows": None, "onednn_ms": ",.2f", "c_ms": ",.2f", "gain": ".2f"}
    head = f"{found['model']}, {found['dtype']}, {found['device']}, context {found['context']}"
    return f"{head}\n\n{table(found['setups'], forms)}\n\n{table(found['products'], products)}"


if __name__ == "__main__":
    main()
