"""Above the chapters: the bytes that each step to the paged-attention kernel reads and writes, computed.

    python -m minivllm.lab.kernel_traffic --bandwidth 4800     a table for some batches; --help has the rest

Nothing is run and nothing is measured. The bytes are those that the programs ask for, worked out from the
lengths and from the tiles that the kernels choose; a test counts loads and stores in Triton's interpreter and
finds the same numbers. A GPU's memory may move less, where a cache serves what is asked for twice. The time
is bytes over bandwidth: a kernel takes that long at least if no cache helps, and longer where it computes,
waits, or keeps too little of the GPU busy.

Left out: the few numbers of seq_lens and query_start with which a program finds its place.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import click

from minivllm.cli.options import FiniteRange
from minivllm.errors import InvalidOption
from minivllm.lab.attention_work import Traffic, Work, least_traffic
from minivllm.lab.roofline import PEAKS, format_si
from minivllm.lab.tables import Form, table

STEPS = ("triton-naive", "triton-tiled", "triton-grouped", "triton")
H100 = PEAKS["H100 SXM"]
BATCHES = (  # of the command: what it is, seq_lens, query_lens
    ("decode, 64 sequences of 4,096 tokens", (4096,) * 64, (1,) * 64),
    ("decode, 1 sequence of 32,768 tokens", (32768,), (1,)),
    ("prefill of 2,048 tokens", (2048,), (2048,)),
    ("chunk of 512 tokens after 4,096", (4608,), (512,)),
)


def kernel_traffic(name: str, work: Work, num_multiprocessors: int = 132) -> Traffic:
    """What a step asks for: one of STEPS. num_multiprocessors: of the GPU, for which the last one splits.

    It splits as it does where it is told max_query_len and max_seq_len; the bound from a wide block table may
    give more parts.

    A tile has one query, and in the last kernel several. With one program a tile for each query head, or for
    each key/value head from the grouped step on:

        kv = sum over tiles of the keys that its last query sees * heads * 2 * head_dim * itemsize

    Raises InvalidOption for another name, and where Triton, whose tiles these are, is missing.
    """
    tile = _tile(name, work)
    queries, rows, columns = (tile.get(key, 1) for key in ("BLOCK_Q", "BLOCK_M", "BLOCK_N"))
    heads = work.num_kv_heads if "BLOCK_M" in tile else work.num_heads
    keys = work.seen(queries)
    vectors = work.num_tokens * work.num_heads  # of q, and of the output
    splits, written, read = 1, 0, 0
    if name == "triton":
        split = import_module("minivllm.kernels.triton_split")
        one_tile = max(work.query_lens) <= queries  # for each sequence; else a bound is all that is known
        tiles = len(keys) if one_tile else work.num_tokens // queries + len(work.query_lens)
        programs = tiles * work.num_kv_heads
        if one_tile or programs < split.PROGRAMS_EACH * num_multiprocessors:
            key_tiles = _cdiv(max(work.seq_lens), columns)
            splits = split.choose_num_splits(programs, key_tiles, num_multiprocessors)
    if splits > 1:
        # A part has whole tiles of keys. Its output for a token that sees none of them is not read.
        sizes = [_cdiv(_cdiv(end, columns), splits) * columns for end in keys]
        in_tiles = [min(queries, n - first) for n in work.query_lens for first in range(0, n, queries)]
        size_of_token = [size for size, n in zip(sizes, in_tiles, strict=True) for _ in range(n)]
        used = sum(_cdiv(sees, size) for sees, size in zip(work.seen(), size_of_token, strict=True) if sees)
        written = splits * vectors * 4 * (work.head_dim + 1)
        read = 4 * (splits * vectors + used * work.num_heads * work.head_dim)
    return Traffic(
        kv=sum(keys) * heads * 2 * work.head_dim * work.itemsize,
        q=splits * vectors * work.head_dim * work.itemsize,
        tables=sum(keys) * heads * 4,
        out=vectors * work.head_dim * work.itemsize,
        parts_written=written,
        parts_read=read,
        flops=sum(_cdiv(n, columns) for n in keys) * heads * 4 * rows * columns * tile["BLOCK_D"],
        programs=len(keys) * heads * splits,
    )


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _tile(name: str, work: Work) -> dict[str, int]:
    """The tile that the kernel of this name takes for this work."""
    if name not in STEPS:
        raise InvalidOption(f"name={name!r} is not possible: it must be {' or '.join(STEPS)}.")
    module = "attention" if name == "triton" else name.removeprefix("triton-")
    try:
        kernel = import_module(f"minivllm.kernels.triton_{module}")
    except ImportError as error:
        raise InvalidOption(
            f"The tiles are the kernels' own, and Triton cannot be imported ({error}). It is made for Linux."
        ) from error
    group, about = work.num_heads // work.num_kv_heads, _cdiv(work.num_tokens, len(work.query_lens))
    sizes = {
        "naive": (work.head_dim,),
        "tiled": (work.head_dim,),
        "grouped": (group, work.head_dim, work.itemsize),
        "attention": (about, group, work.head_dim, work.itemsize, 90),  # of an H100: capability 9.0
    }[module]
    return getattr(kernel, f"{module}_tile")(*sizes)


def traffic_rows(
    work: Work, bytes_per_second: float = H100.bytes_per_second, num_multiprocessors: int = 132
) -> list[dict[str, object]]:
    """A row for each step and for the least: bytes, their ratio to the least, the time of moving them."""
    least = least_traffic(work)
    steps = {name: kernel_traffic(name, work, num_multiprocessors) for name in STEPS}
    return [
        {
            "kernel": name,
            "programs": traffic.programs or None,
            "K and V": traffic.kv,
            "all": traffic.num_bytes,
            "times the least": traffic.num_bytes / least.num_bytes,
            "ms to move": traffic.num_bytes / bytes_per_second * 1e3,
            "operations": traffic.flops,
        }
        for name, traffic in (steps | {"least": least}).items()
    ]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--bandwidth",
    type=FiniteRange(0, min_open=True),
    default=H100.bytes_per_second / 1e9,
    show_default=f"{H100.bytes_per_second / 1e9:,.0f}, as published for an {H100.name}",
    help="GB/s (10^9 bytes).",
)
@click.option(
    "--num-multiprocessors",
    type=click.IntRange(1),
    default=132,
    show_default=True,
    help="Of the GPU: by them the last kernel chooses how many programs share a sequence's keys.",
)
@click.option("--num-heads", type=click.IntRange(1), default=32, show_default=True, help="As Llama 3 8B has.")
@click.option("--num-kv-heads", type=click.IntRange(1), default=8, show_default=True, help="Likewise.")
@click.option("--head-dim", type=click.IntRange(1, 256), default=128, show_default=True, help="Likewise.")
@click.option(
    "--itemsize", type=click.Choice([2, 4]), default=2, show_default=True, help="Bytes of a number."
)
def main(bandwidth: float, num_multiprocessors: int, **model: int) -> None:
    """Print what each step's programs ask memory for in one layer's attention. Computed, not measured."""
    click.echo(
        "Computed, not measured: the bytes that programs ask for, and the time to move them all at\n"
        f"{bandwidth:,.0f} GB/s. A cache may serve what is asked for twice; arithmetic, waiting and too few\n"
        "programs for the GPU take time that is not in it."
    )
    forms: dict[str, Form] = dict.fromkeys(
        ("kernel", "programs", "K and V", "all", "times the least", "ms to move", "operations")
    )
    forms |= dict.fromkeys(("K and V", "all"), partial(format_si, unit="B"))
    forms |= {"operations": partial(format_si, unit="FLOP"), "ms to move": ".3g", "times the least": ".3g"}
    for title, seq_lens, query_lens in BATCHES:
        try:
            rows = traffic_rows(Work(seq_lens, query_lens, **model), bandwidth * 1e9, num_multiprocessors)
        except InvalidOption as error:
            raise click.UsageError(str(error)) from error
        click.echo(f"\n{title}\n{table(rows, forms)}")


if __name__ == "__main__":
    main()
