"""Moves a store for `store migrate`, and shows how far it is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import typer
from pydantic import ValidationError

from ...core.config.server import StoreConfig
from ...core.errors import ConfigError
from ..formats import count, progress_bar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


async def moved(source: str, target: str) -> int:
    """Move a store between two addresses; return how many rows it has."""
    from .move import move

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # a line for each write to a lost server
    with progress_bar() as progress:
        return await move(_place(source, "FROM"), _place(target, "TO"), _Shown(progress))


def _place(url: str, name: str) -> StoreConfig:
    try:
        return StoreConfig(url=url)
    except ValidationError:
        raise ConfigError(f"{name} has to be sqlite:///FILE or postgresql://USER@HOST/DATABASE") from None


class _Shown:
    """A line for each table that is moved, and a bar for the one that is being moved: copied, then compared."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar: TaskID | None = None
        self._rows = 0

    def begins(self, table: str, rows: int) -> None:
        self._rows = rows
        self._bar = self._progress.add_task(table, total=2 * rows)

    def copied(self, rows: int) -> None:
        assert self._bar is not None
        self._progress.update(self._bar, completed=rows)

    def compared(self, rows: int) -> None:
        assert self._bar is not None
        self._progress.update(self._bar, completed=self._rows + rows)

    def ends(self, table: str, rows: int) -> None:
        assert self._bar is not None
        self._progress.remove_task(self._bar)
        typer.echo(f"{table}: {count(rows)} rows")
