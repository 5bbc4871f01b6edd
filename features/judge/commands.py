"""Adds `rescore`, `rewards` and `rollouts rate`."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from ...commands.command_line import WORK, Commands, Json, configuration
from ...commands.show.rollouts import app as rollouts


def rescore(
    context: typer.Context,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="these rollouts alone, as siblings")
    ] = None,
    function: Annotated[
        str | None, typer.Option("--reward", metavar="FILE.py:NAME", help="the reward function (rewards.function)")
    ] = None,
    rewarder: Annotated[
        str, typer.Option(metavar="KIND", help="a rewarder of judge.use, by its kind or name")
    ] = "function",
    task: Annotated[str | None, typer.Option(help="only rollouts of this task id")] = None,
    since: Annotated[
        str | None, typer.Option(help="only rollouts opened since 2026-01-31, 2026-01-31T12:00, 90m, 12h or 7d")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="also rollouts that this version has scored")] = False,
    retrain: Annotated[bool, typer.Option("--retrain", help="offer what is scored to the trainer again")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show rewards and reasons; post nothing")] = False,
    as_json: Json = False,
) -> None:
    """Have a rewarder score completed rollouts, or the given ones, and record its rewards. Older rewards stay.

    Without --again, the same command resumes where it stopped. The exit code is 1 if the rewarder failed for a rollout.
    """
    from .rescore import Rescore, rescore_command

    work = Rescore(
        config=configuration(context, {"rewards.function": function}), ids=ids or [], task=task, since=since,
        rewarder=rewarder, again=again, retrain=retrain, dry_run=dry_run,
    )  # fmt: skip
    rescore_command(work, as_json=as_json)


app = typer.Typer(cls=Commands, no_args_is_help=True, help="Check whether a rewarder can be trusted.")


@app.command()
def check(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="a rewarder of judge.use, by its kind or name")],
    label: Annotated[str, typer.Option(help="the name of the rewards to compare with")] = "human",
    as_json: Json = False,
) -> None:
    """Show how far a rewarder agrees with people's labels, or with another rewarder's rewards."""
    from .rescore import check_rewarder

    check_rewarder(configuration(context), kind, label, as_json=as_json)


def rate(
    context: typer.Context,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="rollouts, instead of a queue")] = None,
    person: Annotated[
        str, typer.Option("--as", metavar="NAME", help="who rates; each person has a queue", show_default="your user")
    ] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="the maximum number of rollouts")] = 50,
) -> None:
    """Rate rollouts by hand. The rewards are named `human`, and `rewards check` compares a rewarder with them."""
    from .rate import rate_rollouts

    rate_rollouts(configuration(context), ids or [], person or getpass.getuser(), limit)


def add_to(commands: typer.Typer) -> None:
    commands.command(rich_help_panel=WORK)(rescore)
    commands.add_typer(app, name="rewards", rich_help_panel=WORK)
    rollouts.command()(rate)
