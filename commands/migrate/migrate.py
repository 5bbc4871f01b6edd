"""Moves a store from an SQLite file to a PostgreSQL server, or back, and compares each row of it."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, closing
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer
from pydantic import ValidationError

from ...core.config.server import StoreConfig
from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...store.sqlite.file import make_tables
from ..formats import count, progress_bar
from .file import NewStore, Record, Source, Table, file_to_read, new_file, read_tables

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


async def moved(source: str, target: str) -> int:
    """Move a store between two addresses; return how many rows it has."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # a line for each write to a lost server
    with progress_bar() as progress:
        return await move(_place(source, "FROM"), _place(target, "TO"), _Progress(progress))


def _place(url: str, name: str) -> StoreConfig:
    try:
        return StoreConfig(url=url)
    except ValidationError:
        raise ConfigError(f"{name} has to be sqlite:///FILE or postgresql://USER@HOST/DATABASE") from None


class _Progress:
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


async def move(source: StoreConfig, target: StoreConfig, progress: _Progress) -> int:
    """Move the store to a place where there is none; return how many rows it has. The source stays as it is.

    Raise LightningError where that cannot be done. Then there is nothing at the target.
    """
    if source.is_postgres == target.is_postgres:
        how = "pg_dump and pg_restore copy" if source.is_postgres else "`store backup` copies"
        raise ConfigError(f"one of the two has to be sqlite:///FILE, the other postgresql://…; {how} one to its like")
    try:
        async with _to_read(source) as old, _new(target) as new:
            moved = 0
            for table in _tables():
                moved += await _move_table(table, old, new, progress)
            await new.finish()
            old.require_unchanged()
    except (OSError, sqlite3.Error, ValueError) as error:
        raise _failed(source, target, error) from error
    except Exception as error:
        if isinstance(error, LightningError) or not _is_of_server(error):
            raise
        raise _failed(source, target, error) from error
    return moved


def _tables() -> list[Table]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as schema:
        make_tables(schema, "")
        return read_tables(schema)


async def _move_table(table: Table, source: Source, target: NewStore, progress: _Progress) -> int:
    progress.begins(table.name, await source.count(table))
    await target.fill(table, _counted(source.read(table), progress.copied))
    rows = await _compare(table, source, target, progress)
    progress.ends(table.name, rows)
    return rows


async def _compare(table: Table, source: Source, target: NewStore, progress: _Progress) -> int:
    """Compare the rows of both, in their order; return how many they are."""
    there = target.read(table)
    rows = 0
    async for record in _counted(source.read(table), progress.compared):
        rows += 1
        if target.kept(record) != await anext(there, None):
            what = dict(zip(table.columns, record, strict=True))
            where = ", ".join(f"{column} {what[column]!r}" for column in table.key)
            raise LightningError(f"a row of {table.name} was read back differently: {where}. Nothing was moved")
    if await anext(there, None) is not None:
        raise LightningError(f"{table.name} was read back with more rows than it has. Nothing was moved")
    return rows


async def _counted(records: AsyncIterator[Record], report: Callable[[int], None]) -> AsyncIterator[Record]:
    for n in itertools.count(1):
        record = await anext(records, None)
        if record is None:
            return
        if n % 100 == 0:
            report(n)
        yield record


def _to_read(config: StoreConfig) -> AbstractAsyncContextManager[Source]:
    if not config.is_postgres:
        return file_to_read(config)
    _require_asyncpg()
    from .server import server_to_read

    return server_to_read(config)


def _new(config: StoreConfig) -> AbstractAsyncContextManager[NewStore]:
    if not config.is_postgres:
        return new_file(config)
    _require_asyncpg()
    from .server import new_on_server

    return new_on_server(config)


def _require_asyncpg() -> None:
    if find_spec("asyncpg") is None:
        raise StoreUnavailable("postgresql://… needs asyncpg: pip install 'lightning-proxy[postgres]'")


def _is_of_server(error: Exception) -> bool:
    import asyncpg

    return isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError)


def _failed(source: StoreConfig, target: StoreConfig, error: Exception) -> LightningError:
    message = str(error).partition("\n")[0] or type(error).__name__
    return LightningError(f"{source.where} was not moved to {target.where}: {message}")
