"""Above the chapters: `minivllm doctor`, which says whether this installation works."""

from __future__ import annotations

import click


@click.command()
def doctor() -> None:
    """Look at the installation: versions, device, model file, and a known Triton kernel.

    Whatever is at fault here is the environment, not your code. Ends with 1 when something is.
    """
    from rich.console import Console

    from minivllm.lab.doctor import examine

    console = Console()
    marks = {"ok": "[green]ok[/]   ", "note": "[yellow]note[/] ", "fault": "[red]fault[/]"}
    faults = 0
    for finding in examine():
        faults += finding.status == "fault"
        console.print(f"{marks[finding.status]} [bold]{finding.what}[/]:", end=" ")
        console.print(finding.found, markup=False, highlight=False)
    if faults:
        raise click.ClickException(f"{faults} of these lie with this environment, not with your code.")
    console.print("This environment works.")
