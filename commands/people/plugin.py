"""Adds `rollouts rate`."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from ..load import configuration
from ..show.complete import rollout_ids
from ..show.rollouts import app


def rate(
    context: typer.Context,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="rollouts, in place of a queue", autocompletion=rollout_ids),
    ] = None,
    order: Annotated[
        str, typer.Option(help="newest, uncertain (first those with a middling reward) or random")
    ] = "newest",
    person: Annotated[
        str, typer.Option("--as", metavar="NAME", help="who rates; each person has a queue", show_default="your user")
    ] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="at most so many")] = 50,
) -> None:
    """Rate rollouts by hand, one after the other: rewards named `human`, which `rewards check` compares with."""
    from .rate import rate_rollouts

    rate_rollouts(configuration(context), ids or [], order, person or getpass.getuser(), limit)


def add_to(commands: typer.Typer) -> None:
    """Add `rate` to `rollouts`."""
    app.command()(rate)
