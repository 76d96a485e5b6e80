"""Above the chapters: what a program of each Triton kernel takes, and how many fit on one multiprocessor.

A multiprocessor holds several programs at a time: while one waits for memory, another computes. How many is
set by what runs out first: registers, shared memory, threads or, from capability 10.0 on, tensor memory. A
kernel's tile decides what a program takes. A thread that runs out of registers spills to memory, and
waits for it.

Kernels are compiled for the capability asked for; no GPU is needed (see `ahead_of_time`). How fast they are
is not told by this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import click
from tqdm import tqdm

from minivllm.errors import MinivllmError
from minivllm.lab.ahead_of_time import Compiled, check_compiler
from minivllm.lab.kernel_calls import DTYPES, KERNELS, MOVES, STEPS, Configuration, combinations, compiled
from minivllm.lab.tables import table

LEGEND = """\
registers, spilled   of a thread: 4 bytes each, and bytes that it had to move to memory
shared               bytes of shared memory that a program takes
programs, limit      how many fit on one multiprocessor, and what would be used up first by one more
step                 decode: a query for each sequence, few keys; in parts: one long sequence, so that
                     several programs share its keys; few queries: 5 each; prefill: 1,024 each"""
TAKEN = ("threads", "registers", "spilled", "shared", "tensor_columns")


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor has, and the most that a program may take of it; bytes of shared memory."""

    shared: int
    shared_of_program: int
    tensor_columns: int = 0
    registers: int = 65_536
    threads: int = 2048
    programs: int = 32


# NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications; for tensor
# memory: PTX ISA, "Tensor Memory". The tuning guides for Ampere, Hopper and Blackwell repeat the numbers.
MULTIPROCESSORS = {
    80: Multiprocessor(164 * 1024, 163 * 1024),
    90: Multiprocessor(228 * 1024, 227 * 1024),
    100: Multiprocessor(228 * 1024, 227 * 1024, tensor_columns=512),
}
RESERVED = 1024  # bytes of shared memory that CUDA takes for itself with each program (the tuning guides)
PARTITIONS = 4  # of a multiprocessor: each has its own registers and runs its own warps


def programs_each(kernel: Compiled, capability: int) -> tuple[int, str]:
    """How many programs one multiprocessor holds at a time, and what there is too little of for one more.

    Each of the four partitions gives registers to whole warps, in units of 256 (CUDA's occupancy calculator).
    """
    has = MULTIPROCESSORS[capability]
    warps = kernel.threads // 32
    of_warp = -(-kernel.registers * 32 // 256) * 256
    most = {
        "programs": has.programs,
        "threads": has.threads // kernel.threads,
        "registers": PARTITIONS * (has.registers // PARTITIONS // of_warp) // warps,
        "shared memory": has.shared // (-(-kernel.shared // 128) * 128 + RESERVED),
    }
    if kernel.tensor_columns:
        most["tensor memory"] = has.tensor_columns // kernel.tensor_columns
    limit = min(most, key=lambda what: most[what])
    return most[limit], limit


def resources(wanted: Iterable[Configuration]) -> Iterator[dict[str, Any]]:
    """A row for each kernel of each configuration: what it is, what a program takes, how many programs fit.

    Raises InvalidOption as `check_compiler` does.
    """
    for configuration in wanted:
        for kernel in compiled(configuration):
            programs, limit = programs_each(kernel, configuration.capability)
            taken = {name: getattr(kernel, name) for name in TAKEN}
            function = {"function": kernel.kernel.removesuffix("_kernel")}
            yield {**asdict(configuration), **function, **taken, "programs": programs, "limit": limit}


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `resources` as a table; what is the same in all of them stands above it."""
    axes = [field.name for field in fields(Configuration) if field.name != "kernel"]
    rows = [{**row, "step": "any"} if row["kernel"] in MOVES else row for row in rows]
    same = {name: rows[0][name] for name in axes if len({row[name] for row in rows}) == 1}
    shown = ["function", *(name for name in axes if name not in same), *TAKEN, "programs", "limit"]
    forms = {name: None for name in shown if name != "tensor_columns"} | {"shared": ",d"}
    above = ", ".join(f"{name} {value}" for name, value in same.items())
    return f"{above}\n\n{table([{name: row[name] for name in forms} for row in rows], forms)}\n\n{LEGEND}"


def _choice(name: str, values: Iterable[str], default: Iterable[str]) -> Any:
    return click.option(
        name,
        type=click.Choice(list(values)),
        multiple=True,
        default=list(default),
        show_default=True,
        help="Which; may be given several times.",
    )


def _sizes(name: str, default: int, most: int) -> Any:
    return click.option(
        name,
        type=click.IntRange(1, most),
        multiple=True,
        default=[default],
        show_default=True,
        help="May be given several times.",
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_choice("--kernel", KERNELS, KERNELS)
@_choice("--dtype", DTYPES, ["bfloat16"])
@_sizes("--head-dim", 128, 256)
@_sizes("--block-size", 16, 1024)
@_sizes("--group", 4, 64)
@_choice("--step", STEPS, STEPS)
@_choice("--capability", map(str, MULTIPROCESSORS), map(str, MULTIPROCESSORS))
@click.option("--json", "as_json", is_flag=True, help="JSON lines in place of a table.")
def main(as_json: bool, capability: tuple[str, ...], **axes: tuple[Any, ...]) -> None:
    """Compile Triton kernels for GPUs that need not be here, and print what a program of each takes.

    Each option may be given several times: every combination is compiled. --capability 90 is 9.0.
    """
    try:
        wanted = combinations(**axes, capability=map(int, capability))
        check_compiler()
        rows = list(resources(tqdm(wanted, "compiling", file=sys.stderr, disable=None)))
    except MinivllmError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n".join(map(json.dumps, rows)) if as_json else as_text(rows))


if __name__ == "__main__":
    main()
