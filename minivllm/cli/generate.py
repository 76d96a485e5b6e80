"""Above the chapters: `minivllm generate`, one prompt continued on the screen."""

from __future__ import annotations

import sys
from typing import Any

import click

from minivllm.cli.options import model_options
from minivllm.cli.streaming import fetch, show, speed, where


@click.command()
@click.argument("prompt")
@model_options
@click.option(
    "--cache",
    type=click.Choice(["recompute", "naive", "contiguous", "paged"]),
    default="paged",
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
@click.option("--stop", multiple=True, help="End the text before this string. May be given several times.")
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
    stop: tuple[str, ...],
    ignore_eos: bool,
) -> None:
    """Continue PROMPT ("-" reads it from standard input) and print the text as it comes."""
    from minivllm.params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    if prompt == "-":
        if sys.stdin is None:
            raise click.UsageError('PROMPT is "-", and there is no standard input.')
        prompt = sys.stdin.read()

    from minivllm.llm import LLM

    fetch(model)
    llm = LLM(model, dtype=dtype, device=device, cache=cache, max_num_seqs=1, seed=None)
    asked: dict[str, Any] = {"prompt": prompt}
    if chat:
        message = {"role": "user", "content": prompt}
        asked = {"prompt_token_ids": llm.get_tokenizer().apply_chat_template([message])}
    pieces = llm.stream(asked, params)
    if not chat:
        click.echo(prompt, nl=False)
    output = show(pieces)
    click.echo(f"[{speed(output)}; {cache} memory, {where(llm)}]", err=True)
