"""Above the chapters: the command `python -m minivllm.lab.gpu_check`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from minivllm.errors import MinivllmError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="The folder for the results.")
@click.option("--parts", default="all", show_default=True, help="Which, with commas between: kernels,decode.")
@click.option("--minutes", type=click.FloatRange(0), default=8.0, show_default=True, help="For all parts.")
@click.option("--show", is_flag=True, help="Measure nothing; print what is kept in book/results.")
def main(out: Path | None, parts: str, minutes: float, show: bool) -> None:
    """Prove and measure the kernels and the engine on a GPU; results go to OUT/gpu_check.json.

    Parts: kernels, agreement, decode, prefill, copy, engine, notebooks, tuning. The file is written after
    each. The exit code is 1 where a part failed or a result was wrong; a target that was missed is only
    reported.

    Without a GPU all runs in miniature, to OUT/miniature.json; set TRITON_INTERPRET=1 for the Triton kernels.
    """
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # to look for a GPU must not keep it from a fork
    from minivllm.lab.gpu_check.check import PARTS, run_check
    from minivllm.lab.gpu_check.show import table

    if show:
        from minivllm.lab.here import gpu_results

        click.echo(table(gpu_results("gpu_check")))
        return
    names = list(PARTS) if parts == "all" else [name.strip() for name in parts.split(",")]
    for name in names:
        if name not in PARTS:
            raise click.BadParameter(
                f"{name!r} is no part; the parts are {', '.join(PARTS)}.", param_hint="--parts"
            )
    if out is None:
        raise click.UsageError("Say where the results go: --out DIR. Or print what is kept: --show.")
    begin = time.monotonic()

    def log(line: str) -> None:
        click.echo(f"[{time.monotonic() - begin:6.1f} s] {line}", err=True)

    try:
        found = run_check(names, out, minutes, log)
    except (MinivllmError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(table(found))
    if any(part["status"] == "failed" for part in found["parts"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
