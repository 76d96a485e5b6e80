"""Above the chapters: how the time of a step grows: by running requests, by context, by blocks in the pool.

    python -m minivllm.lab.growth --out DIR

The first two grow since there is more to compute and more to read. The third should not: nothing may look
through the whole pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from minivllm.cli.options import FiniteRange
from minivllm.errors import MinivllmError
from minivllm.lab.curves import QUICK_MODEL, curve_options, in_miniature, whole_numbers
from minivllm.lab.growth_curves import LEAST_POOL, Plan, measure_growth
from minivllm.lab.tables import table

QUICK = {"model": QUICK_MODEL, "contexts": "128,256,512,1024"}
HEADS = {"by_running": "running", "by_context": "context", "by_pool": "num_blocks"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@curve_options
@click.option("--running", default="1,2,4,8,16,32,64,128,256,512", show_default=True, help="Requests.")
@click.option("--contexts", default="128,256,512,1024,2048,4096,8192", show_default=True, help="Tokens.")
@click.option("--pools", default="1024,4096,16384,65536,262144,1048576", show_default=True, help="Blocks.")
@click.option("--context", type=int, default=128, show_default=True, help="Of the running requests.")
@click.option("--num-seqs", type=click.IntRange(1), default=8, show_default=True, help="Requests by context.")
@click.option(
    "--num-steps", type=click.IntRange(1), default=5, show_default=True, help="Timed at each point."
)
@click.option(
    "--kv-cache-memory-bytes", "memory", type=click.IntRange(1), default=None, help="Most of a pool."
)
@click.option("--minutes", type=FiniteRange(0), default=6.0, show_default=True, help="No point begins later.")
def main(out: Path, quick: bool, **chosen: Any) -> None:
    """Time decode steps by running requests, by context, and by blocks in the pool.

    Results and picture go to OUT/growth.json and .png. A point that has no room in memory, or that would
    begin too late, is left out, and the results say so. Times are this machine's; only points of one run can
    be compared.
    """
    if quick:
        chosen = in_miniature(chosen, QUICK)
    source = {name: chosen.pop(name) for name in ("model", "dtype", "device")}
    for name in ("running", "contexts", "pools"):
        chosen[name] = whole_numbers(chosen[name], f"--{name}")
    plan = Plan(**chosen)
    least = plan.num_steps + 2
    for option, numbers, at_least in (
        ("--context", [plan.context], least),
        ("--contexts", plan.contexts, least),
        ("--pools", plan.pools, LEAST_POOL),
    ):
        if min(numbers) < at_least:
            raise click.BadParameter(
                f"{min(numbers)} is not possible: it must be at least {at_least}.", param_hint=option
            )
    try:
        found = measure_growth(out, source, plan)
    except (MinivllmError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(as_text(found))


def as_text(found: Mapping[str, Any]) -> str:
    """The three curves as tables, times in milliseconds."""
    blocks = [f"{found['model']}, {found['dtype']}, {found['device']}"]
    for curve, head in HEADS.items():
        forms = {head: None, "step_ms": ",.2f", "host_ms": ",.2f", "tok_s": ",.1f"}
        if curve == "by_pool":
            forms["schedule_ms"] = ",.3f"
            blocks.append(f"With {found['pool_model']}:")
        rows = found.get(curve, [])
        blocks.append(table([{name: row.get(name) for name in forms} for row in rows], forms))
        blocks += [f"{head} {row[head]} left out: {row['skipped']}." for row in rows if "skipped" in row]
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
