"""`status` and `doctor`: how the system is."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="show it again and again, until Ctrl-C")] = False,
    as_json: Json = False,
) -> None:
    """Show the state of the running system. The exit code is 1 if it is not ready."""
    from ..proxy.config.file import load_config
    from .show.status import show_status
    from .show.watch import watch_status

    if watch:
        watch_status(load_config(context.obj), as_json=as_json)
    elif not show_status(load_config(context.obj), as_json=as_json):
        raise typer.Exit(1)


def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Check every link, from configuration to rewards, and say what to fix. The exit code is 1 if a check failed."""
    from .doctor.doctor import doctor as run

    if not run(context.obj, as_json=as_json):
        raise typer.Exit(1)
