"""Moves a store from an SQLite file to a PostgreSQL server, or back, and compares each row of it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer
from pydantic import ValidationError

from ...core.config.server import StoreConfig
from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...store.sqlite.file import make_tables
from ..formats import count, progress_bar
from .file import BATCH, FileStore, Record, Table, file_to_read, new_file, read_tables

if TYPE_CHECKING:
    from rich.progress import Progress

    from .server import ServerStore


async def move(from_url: str, to_url: str) -> int:
    """Move a store to an address where there is none; return how many rows it has. The source stays as it is.

    Raise LightningError where that cannot be done. Then there is nothing at the target.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # a line for each write to a lost server
    source, target = _place(from_url, "FROM"), _place(to_url, "TO")
    if source.is_postgres == target.is_postgres:
        how = "pg_dump and pg_restore copy" if source.is_postgres else "`store backup` copies"
        raise ConfigError(f"one of the two has to be sqlite:///FILE, the other postgresql://…; {how} one to its like")
    if find_spec("asyncpg") is None:
        raise StoreUnavailable("postgresql://… needs asyncpg: pip install 'lightning-proxy[postgres]'")
    import asyncpg

    from .server import new_on_server, server_to_read

    reading = server_to_read(source) if source.is_postgres else file_to_read(source)
    making = new_on_server(target) if target.is_postgres else new_file(target)
    try:
        with progress_bar() as progress:
            async with reading as old, making as new:
                rows = sum([await _move_table(table, old, new, progress) for table in all_tables()])
                await new.finish()
                old.require_unchanged()
    except (OSError, sqlite3.Error, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        message = str(error).partition("\n")[0] or type(error).__name__
        raise LightningError(f"{source.where} was not moved to {target.where}: {message}") from error
    return rows


def _place(url: str, name: str) -> StoreConfig:
    try:
        return StoreConfig(url=url)
    except ValidationError:
        raise ConfigError(f"{name} has to be sqlite:///FILE or postgresql://USER@HOST/DATABASE") from None


def all_tables() -> list[Table]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as schema:
        make_tables(schema, "")
        return read_tables(schema)


async def _move_table(
    table: Table, source: FileStore | ServerStore, target: FileStore | ServerStore, progress: Progress
) -> int:
    """Copy a table's rows, then compare both, in their order. Return how many they are."""
    bar = progress.add_task(table.name, total=2 * await source.count(table))

    def advance() -> None:
        progress.advance(bar, BATCH)

    await target.fill(table, _batched(source.read(table), advance))
    there, rows = target.read(table), 0
    async for record in _batched(source.read(table), advance):
        rows += 1
        if target.kept(record) != await anext(there, None):
            what = dict(zip(table.columns, record, strict=True))
            where = ", ".join(f"{column} {what[column]!r}" for column in table.key)
            raise LightningError(f"a row of {table.name} was read back differently: {where}. Nothing was moved")
    if await anext(there, None) is not None:
        raise LightningError(f"{table.name} was read back with more rows than it has. Nothing was moved")
    progress.remove_task(bar)
    typer.echo(f"{table.name}: {count(rows)} rows")
    return rows


async def _batched(records: AsyncIterator[Record], advance: Callable[[], None]) -> AsyncIterator[Record]:
    """Yield the records, and say so after each batch of them."""
    n = 0
    async for record in records:
        n += 1
        if n % BATCH == 0:
            advance()
        yield record
