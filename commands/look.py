"""`status` and `doctor`: how the system is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .load import configuration

Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


def status(
    context: typer.Context,
    as_json: Json = False,
) -> None:
    """Show the state of the running system. The exit code is 1 if it is not ready."""
    from .show.status import show_status

    if not show_status(configuration(context), as_json=as_json):
        raise typer.Exit(1)


def doctor(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(help="with --learn: the agent program, after `--`")] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="see by a few training steps whether this system learns")
    ] = False,
    tasks: Annotated[
        Path | None, typer.Option(help="with --learn: a JSON Lines file", show_default="four questions")
    ] = None,
    preload: Annotated[
        str, typer.Option(help="with --learn: modules to import once for all runs of `python script.py …`")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="with --learn: replace merged weights while rollouts run")] = False,
    model: Annotated[str | None, typer.Option(help="a Hugging Face id or a directory (policy.model)")] = None,
    as_json: Json = False,
) -> None:
    """Check every link, from configuration to rewards, and say what to fix. The exit code is 1 if a check failed."""
    from ..core.errors import ConfigError

    if not learn and (command or tasks or preload or yes):
        raise ConfigError("--tasks, --preload, --yes and a program need --learn")
    if learn:
        from .doctor.learn.learn import LearnRequest, learn_command

        modules = preload.split(",") if preload else []
        done = learn_command(context.obj, LearnRequest(tasks, command or [], yes, as_json, modules, model))
    else:
        from .doctor.doctor import doctor as run

        done = run(context.obj, model, as_json=as_json)
    if not done:
        raise typer.Exit(1)
