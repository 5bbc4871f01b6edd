"""Plugs in `costs`, and the option `--budget` of `run`."""

from __future__ import annotations

from typing import Annotated

import typer

from ...commands.command_line import RECORD, configuration


def costs(
    context: typer.Context,
    by: Annotated[str, typer.Option(help="day, model, key, task, rollout, mode or step")] = "day",
    since: Annotated[
        str | None, typer.Option(help="only calls since 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="at most so many lines")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Show what calls used and cost, what rewarders spent, or (--by step) the seconds of training steps."""
    from .command import costs_command

    costs_command(configuration(context), by, since, limit, as_json=as_json)


def add_to(commands: typer.Typer) -> None:
    """Add `costs` to the commands."""
    commands.command(rich_help_panel=RECORD)(costs)
