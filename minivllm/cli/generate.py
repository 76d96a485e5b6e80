"""Above the chapters: `minivllm generate`, one prompt continued on the screen."""

from __future__ import annotations

import sys
import time

import click

from minivllm.cli.options import download_bar, model_options


@click.command()
@click.argument("prompt")
@model_options
@click.option(
    "--cache",
    type=click.Choice(["recompute", "naive"]),
    default="naive",
    show_default=True,
    help="KV memory.",
)
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat format.")
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Most tokens to generate.")
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."
)
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="Keep the K likeliest tokens; 0 keeps all."
)
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    help="Keep the likeliest tokens until their probabilities sum to P.",
)
@click.option(
    "--min-p",
    type=float,
    default=0.0,
    show_default=True,
    help="Drop tokens less likely than P times the likeliest.",
)
@click.option(
    "--seed", type=int, default=None, help="With a temperature above 0: sample the same tokens each time."
)
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
def generate(
    prompt: str,
    model: str,
    dtype: str,
    device: str,
    cache: str,
    chat: bool,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    ignore_eos: bool,
) -> None:
    """Continue PROMPT ("-" reads it from standard input) and print the text as it comes."""
    from minivllm.params import SamplingParams

    params = SamplingParams(temperature, top_k, top_p, min_p, seed, max_tokens, ignore_eos)

    from minivllm.decoding import generate as loop
    from minivllm.decoding.detokenizer import Detokenizer
    from minivllm.memory.naive_store import NaiveStore
    from minivllm.memory.store import KVStore, RecomputeStore
    from minivllm.model.hub import resolve
    from minivllm.model.loader import load_model
    from minivllm.model.tokenizer import load_tokenizer

    if prompt == "-":
        if sys.stdin is None:
            raise click.UsageError('PROMPT is "-", and there is no standard input.')
        prompt = sys.stdin.read()
    with download_bar() as progress:
        source = resolve(model, progress=progress)
    tokenizer = load_tokenizer(source)
    prompt_ids = (
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        if chat
        else tokenizer.encode(prompt)
    )
    decoder = load_model(source, dtype=dtype, device=device)
    store: KVStore = NaiveStore() if cache == "naive" else RecomputeStore()

    detokenizer, times = Detokenizer(tokenizer), [time.perf_counter()]
    if not chat:
        click.echo(prompt, nl=False)
    for token in loop.generate(decoder, store, prompt_ids, params):
        times.append(time.perf_counter())
        click.echo(detokenizer.add(token), nl=False)
    click.echo(detokenizer.flush())

    summary = f"{len(prompt_ids)} prompt tokens, first token after {times[1] - times[0]:.2f} s"
    if len(times) > 2:
        summary += f", then {(len(times) - 2) / (times[-1] - times[1]):.1f} tokens/s"
    click.echo(
        f"[{summary}; {cache} memory, {str(decoder.dtype).removeprefix('torch.')}, {decoder.device}]",
        err=True,
    )
