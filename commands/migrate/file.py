"""The tables of a store in an SQLite file: read as of one moment, or filled before the file gets its name."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.config.server import StoreConfig
from ...core.errors import LightningError
from ...store.sqlite.file import (
    FILES,
    IdleFile,
    connect_to_read,
    is_in_use,
    lock_file,
    make_private,
    make_tables,
    new_store,
)

Record = tuple[Any, ...]

BATCH = 200  # rows; those of `calls` may be large


@dataclass(frozen=True)
class Table:
    """A table. `columns`: in the order of a record; `key`: those that order its rows, each row at another place."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]


def read_tables(schema: sqlite3.Connection) -> list[Table]:
    """Return the tables of an SQLite store, but for `schema_numbers`, which each store has for itself."""
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'schema_numbers' ORDER BY rowid"
    tables = []
    for (name,) in schema.execute(names).fetchall():
        columns = [(row[1], row[5]) for row in schema.execute(f"PRAGMA table_info({name})")]  # and its place in the key
        key = sorted((place, column) for column, place in columns if place)
        tables.append(Table(name, tuple(column for column, _ in columns), tuple(column for _, column in key)))
    return tables


def quoted(columns: tuple[str, ...]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


class FileStore:
    """A store as it was at one moment, or a new one. `idle`: where nobody may write to the file meanwhile."""

    def __init__(self, connection: sqlite3.Connection, path: Path, idle: IdleFile | None = None) -> None:
        self._connection = connection
        self._path = path
        self._idle = idle

    async def count(self, table: Table) -> int:
        return int(self._connection.execute(f"SELECT COUNT(*) FROM {table.name}").fetchone()[0])

    async def read(self, table: Table) -> AsyncIterator[Record]:
        sql = f"SELECT {quoted(table.columns)} FROM {table.name} ORDER BY {quoted(table.key)}"
        cursor = self._connection.execute(sql)
        while rows := cursor.fetchmany(BATCH):
            for row in rows:
                yield tuple(row)

    def require_unchanged(self) -> None:
        """Raise LightningError if what was read may not be of one moment."""
        if self._idle is not None and self._idle.is_written():
            raise LightningError(
                f"{self._path} was written to meanwhile: stop the proxy and the trainer, and try again"
            )

    async def fill(self, table: Table, records: AsyncIterable[Record]) -> None:
        places = ", ".join("?" * len(table.columns))
        sql = f"INSERT INTO {table.name} ({quoted(table.columns)}) VALUES ({places})"
        batch: list[Record] = []
        async for record in records:
            batch.append(record)
            if len(batch) == BATCH:
                self._connection.executemany(sql, batch)
                batch = []
        self._connection.executemany(sql, batch)

    def kept(self, record: Record) -> Record:
        """Return the record as this store keeps it."""
        return record

    async def finish(self) -> None:
        """Check the new store, once all tables are filled."""
        if wrong := self._connection.execute("PRAGMA foreign_key_check").fetchone():
            raise LightningError(f"a row of {wrong[0]} refers to one of {wrong[2]} that is not there")


@asynccontextmanager
async def file_to_read(config: StoreConfig) -> AsyncIterator[FileStore]:
    """Yield a snapshot of the store; others may keep writing to it."""
    path = config.path.absolute()
    if not path.is_file():
        raise LightningError(f"there is no store at {path}")
    idle = None if is_in_use(path) else IdleFile(path)
    with closing(connect_to_read(path, config.busy_timeout_s)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM policy_log").fetchone()  # that moment
        yield FileStore(connection, path, idle)


@asynccontextmanager
async def new_file(config: StoreConfig) -> AsyncIterator[FileStore]:
    """Yield an empty store, which gets its name after the block. Raise LightningError where there is one."""
    path = config.path.absolute()
    _require_none(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.part")
    with lock_file(lock, "lock") as ours:
        if not ours:
            raise LightningError(f"another process moves a store to {path} now")
        try:
            with new_store(path) as part:
                make_private(part)
                with closing(sqlite3.connect(part, isolation_level=None)) as connection, _without_triggers(connection):
                    connection.execute("BEGIN")
                    yield FileStore(connection, path)
                    connection.execute("COMMIT")
                _require_none(path)
        finally:
            Path(f"{lock}-lock").unlink(missing_ok=True)


@contextmanager
def _without_triggers(connection: sqlite3.Connection) -> Iterator[None]:
    """Make an empty store, whose triggers come when the block ends: they note what happens, not what is moved."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA synchronous = OFF")  # it is synced once before it gets its name
    connection.execute("PRAGMA journal_mode = OFF")
    make_tables(connection, "")
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for table in reversed(read_tables(connection)):
        connection.execute(f"DELETE FROM {table.name}")
    yield
    for _, sql in triggers:
        connection.execute(sql)


def _require_none(path: Path) -> None:
    if any(path.with_name(path.name + suffix).exists() for suffix in FILES):
        raise LightningError(f"there is something at {path} already: a store is moved to a new file")
