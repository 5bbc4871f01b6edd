"""Lists the commands' side rooms that are on board, and adds their commands to the command line."""

from __future__ import annotations

from importlib import import_module

import typer

# Each is a folder of the commands with a module `plugin`. A room is taken out by deleting its folder and its line.
# In this order: a room may add options to the commands of those before it.
ON_BOARD = (
    "prompts",
    "optimize",
    "rewarders",
    "page",
    "experiment",
    "environments",
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of the side rooms. Their modules import the rest when a command runs."""
    for room in ON_BOARD:
        import_module(f".{room}.plugin", __package__).add_to(app)
