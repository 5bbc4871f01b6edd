"""The options of `optimize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...commands.command_line import WORK, Command, Concurrency, Json, Tasks, configuration


def optimize(
    context: typer.Context,
    command: Command,
    method: Annotated[Literal["gepa", "apo"], typer.Option(help="how to search")],
    prompt: Annotated[str, typer.Option(metavar="NAME", help="a prompt of `prompts list`")],
    tasks: Tasks,
    reflect: Annotated[str, typer.Option(metavar="MODEL", help="litellm's name of the model that writes prompts")],
    reflect_url: Annotated[
        str | None, typer.Option(metavar="URL", help="that model's base URL, if not the provider's own")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="tasks to judge by", show_default="a fifth of --tasks")
    ] = None,
    budget: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="at most N rollouts of the search and N calls of the reflecting model"),
    ] = 200,
    concurrency: Concurrency = 8,
    promote: Annotated[bool, typer.Option("--promote", help="make the best prompt live")] = False,
    as_json: Json = False,
) -> None:
    """Search for a better prompt. The agent need not change: the proxy inserts the prompts.

    Rollouts are in mode eval, so no weights are trained on them. Every prompt that is tried becomes a version, and the
    best is compared with the first on held-out tasks. Run the same command again to resume where it stopped.
    """
    from ...commands.formats import print_json
    from ...commands.signals import run_until_signal
    from .search import optimized, summary

    found = run_until_signal(
        optimized(
            configuration(context), command, method=method, prompt=prompt, tasks=tasks, held_out=held_out,
            reflect=reflect, reflect_url=reflect_url, budget=budget, concurrency=concurrency, promote=promote,
        )
    )  # fmt: skip
    if as_json:
        print_json(found)
    else:
        typer.echo(summary(found, promoted=promote), err=True)


def add_to(commands: typer.Typer) -> None:
    commands.command(rich_help_panel=WORK, context_settings={"allow_interspersed_args": False})(optimize)
