"""Adds the command `dashboard`, which serves the page for a store."""

from __future__ import annotations

from typing import Annotated

import typer

from ...commands.command_line import RECORD, configuration


def dashboard(
    context: typer.Context,
    store: Annotated[
        str | None, typer.Option(metavar="FILE", help="a store's file, or postgresql://…", show_default="store.url")
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="the page's port")] = 8081,
) -> None:
    """Serve the page for a store, without a proxy, and print its address.

    A running proxy has the same page at its own address. This command only reads the store. The printed address
    contains a key: share it only with people who may read the store.
    """
    from ...core.config.server import StoreConfig
    from .dashboard import dashboard as run

    url = store if store is None or "://" in store else f"sqlite:///{store}"
    run(configuration(context).store if url is None else StoreConfig(url=url), port)


def add_to(commands: typer.Typer) -> None:
    commands.command(rich_help_panel=RECORD)(dashboard)
