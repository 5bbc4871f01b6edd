"""The command `experiment`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...commands.command_line import WORK


def experiment(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="variants, seeds, tasks and agent, in YAML")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="the runs' folder", show_default="lightning-experiments/FILE")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="runs side by side, each with a vLLM of its own")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the cost; start nothing")] = False,
) -> None:
    """Compare variants of the configuration over seeds, with your tasks and agent.

    Each run trains in a folder of its own and evaluates held-out tasks before and after. Run the same command again to
    resume.
    """
    from .experiment import experiment as run

    run(file, context.obj, directory or Path("lightning-experiments") / file.stem, jobs, dry_run=dry_run)


def add_to(commands: typer.Typer) -> None:
    commands.command(rich_help_panel=WORK)(experiment)
