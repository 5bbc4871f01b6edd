"""Lists the commands' side rooms that are on board, and plugs them in: their commands, and variables of programs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from .api_client import OpenRollout

# Each is a folder of the commands with a module `plugin`. A room is taken out by deleting its folder and its line.
# In this order: a room may add options to the commands of those before it.
ON_BOARD = (
    "prompts",
    "optimize",
    "rewarders",
    "people",
    "page",
    "experiment",
    "environments",
    "agl",
    "costs",
)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of the side rooms. Their modules import the rest when a command runs."""
    for add_to in _brought("add_to"):
        add_to(app)


def variables(proxy_url: str, rollout: OpenRollout) -> dict[str, str]:
    """Return what side rooms add to the variables of a program that works on a rollout."""
    found: dict[str, str] = {}
    for of_room in _brought("variables"):
        found |= of_room(proxy_url, rollout)
    return found


def _brought(name: str) -> list[Callable[..., Any]]:
    """Return the function of this name of each room that has one."""
    plugins = [import_module(f".{room}.plugin", __package__) for room in ON_BOARD]
    return [getattr(plugin, name) for plugin in plugins if hasattr(plugin, name)]
