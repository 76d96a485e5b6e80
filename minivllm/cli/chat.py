"""Above the chapters: `minivllm chat`, a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from minivllm.cli.options import model_options
from minivllm.cli.streaming import fetch, show, speed, where

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.params import SamplingParams

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it."


@click.command()
@model_options
@click.option("--system", default=None, help="What the model is told before the conversation.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens of one answer.")
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."
)
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens up to P."
)
@click.option("--seed", type=int, default=None, help="With a temperature above 0: the same tokens each time.")
def chat(
    model: str,
    dtype: str,
    device: str,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
) -> None:
    """Talk with the model: a line is a message, and Ctrl-C stops an answer.

    /reset forgets the conversation, /quit (or Ctrl-D) ends it. Text piped in is read line by line.
    """
    from minivllm.params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)

    from minivllm.errors import InvalidPrompt
    from minivllm.llm import LLM

    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and keys to edit with
    fetch(model)
    llm = LLM(model, dtype=dtype, device=device, max_num_seqs=1, seed=None)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    llm.get_tokenizer().apply_chat_template([*beginning, {"role": "user", "content": "?"}])  # or refuse now
    click.echo(f"{model}, {where(llm)}. {HELP}", err=True)
    messages = list(beginning)
    while (line := _next_line()) is not None:
        if line == "/quit":
            break
        if line == "/reset":
            messages = list(beginning)
            click.echo("The conversation begins anew.", err=True)
        elif line.startswith("/"):
            click.echo(f"There is no {line.split()[0]}. {HELP}", err=True)
        elif line:
            question = {"role": "user", "content": line}
            try:
                answer = _answer(llm, [*messages, question], params)
            except InvalidPrompt as error:  # too long, or no text at all: the rest of the conversation stays
                click.echo(f"{error} Or begin anew with /reset.", err=True)
                continue
            messages += [question, {"role": "assistant", "content": answer}]


def _next_line() -> str | None:
    """A line from the reader; None at the end of the input."""
    if sys.stdin is None:
        return None
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer while it comes; returns what there is of it, also after Ctrl-C."""
    ids = llm.get_tokenizer().apply_chat_template(messages)
    stream, pieces = llm.stream({"prompt_token_ids": ids}, params), list[str]()
    try:
        output = show(stream, pieces.append)
    except KeyboardInterrupt:
        stream.close()
        click.echo("\n[stopped]", err=True)
    else:
        click.echo(f"[{speed(output)}]", err=True)
    return "".join(pieces)
