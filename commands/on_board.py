"""Lists the commands' side rooms that are on board, and plugs them in: their commands, and variables of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from ..core.on_board import modules

if TYPE_CHECKING:
    from .api_client import OpenRollout


def add_commands(app: typer.Typer) -> None:
    """Add the commands of the side rooms. Their modules import the rest when a command runs."""
    for add_to in brought("add_to"):
        add_to(app)


def variables(proxy_url: str, rollout: OpenRollout) -> dict[str, str]:
    """Return what side rooms add to the variables of a program that works on a rollout."""
    found: dict[str, str] = {}
    for of_room in brought("variables"):
        found |= of_room(proxy_url, rollout)
    return found


def brought(name: str) -> list[Callable[..., Any]]:
    """Return the function of this name of each feature that has one."""
    return [getattr(module, name) for module in modules("commands") if hasattr(module, name)]
