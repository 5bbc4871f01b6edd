"""Plugs the page over a store alone in: `dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...commands.command_line import RECORD, configuration


def dashboard(
    context: typer.Context,
    store: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="a store's file, a folder of stores, or postgresql://…; again for more stores",
            show_default="store.url",
        ),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="the page's port")] = 8081,
) -> None:
    """Show the page over a store alone, in a browser. The proxy need not run.

    A running proxy has the same page at its own address. Here nothing is written, served or trained. Several stores get
    a page that lists their curves. The address that is printed holds a key: give it to nobody who is not to read them.
    """
    from .dashboard import dashboard as run
    from .dashboard import stores_at

    if store is None:
        run(lambda: [configuration(context).store], port, is_folder=False)
    else:
        is_folder = any(Path(one).is_dir() for one in store)
        run(lambda: [found for one in store for found in stores_at(one)], port, is_folder=is_folder)


def add_to(commands: typer.Typer) -> None:
    """Add `dashboard` to the commands."""
    commands.command(rich_help_panel=RECORD)(dashboard)
