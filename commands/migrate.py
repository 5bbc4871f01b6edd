"""`store migrate`: copies a store from an SQLite file to a PostgreSQL server, or back, and compares every row."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import ValidationError

from ..core.config.server import StoreConfig
from ..core.errors import ConfigError, LightningError, StoreUnavailable
from ..store.schema import require_all
from ..store.sqlite import file as sqlite_file
from .formats import count

if TYPE_CHECKING:
    import asyncpg

Rows = list[tuple[Any, ...]]

BATCH = 200  # rows; a row of `calls` may be large
# What is not numbered yet gets the numbers after the highest. Nobody has seen those.
FEED = """
SELECT n, kind, ref FROM (
    SELECT n, kind, ref FROM feed UNION ALL
    SELECT (SELECT COALESCE(MAX(n), 0) FROM feed) + ROW_NUMBER() OVER (ORDER BY n), kind, ref FROM feed_in
) AS numbered ORDER BY n
"""
IDENTITIES = """
SELECT relname AS table, attname AS column FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE attidentity <> '' AND relkind = 'r' AND relnamespace = current_schema()::regnamespace
"""
SETTINGS = {
    "jit": "off",
    "application_name": "lightning-proxy store migrate",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}


@dataclass(frozen=True)
class Table:
    """A table of a store. `columns` are in the order of a row; `key` names the columns that the rows are ordered by."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def listed(self) -> str:
        return ", ".join(f'"{column}"' for column in self.columns)

    @property
    def read(self) -> str:
        order = ", ".join(f'"{column}"' for column in self.key)
        return f"SELECT {self.listed} FROM {self.name} ORDER BY {order}"

    def insert(self, place: str) -> str:
        """Return the statement that adds a row. `place` is a value's placeholder, where {} stands for its number."""
        places = ", ".join(place.format(number) for number in range(1, len(self.columns) + 1))
        return f"INSERT INTO {self.name} ({self.listed}) VALUES ({places})"


async def move(from_url: str, to_url: str) -> int:
    """Copy a store to a URL that has none yet, and return the number of rows. The source is not changed.

    If the copy fails, raise LightningError and leave nothing at the target.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # a line for each write to a lost server
    source, target = _place(from_url, "FROM"), _place(to_url, "TO")
    if source.is_postgres == target.is_postgres:
        how = "pg_dump and pg_restore" if source.is_postgres else "`store backup`"
        raise ConfigError(f"give one sqlite:///FILE and one postgresql://…; between two of a kind, use {how}")
    if find_spec("asyncpg") is None:
        raise StoreUnavailable("postgresql://… needs asyncpg: pip install 'lightning-proxy[postgres]'")
    import asyncpg

    making = new_on_server(target) if target.is_postgres else new_file(target)
    reading = server_to_read(source) if source.is_postgres else file_to_read(source)
    rows = 0
    try:
        async with making as new, reading as old:
            for table in all_tables():
                async for batch in old.read(table):
                    await new.fill(table, new.kept(batch))
                rows += await _compared(table, old, new)
    except (OSError, sqlite3.Error, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        message = str(error).partition("\n")[0] or type(error).__name__
        raise LightningError(f"{source.where} was not moved to {target.where}: {message}") from error
    return rows


def _place(url: str, name: str) -> StoreConfig:
    try:
        return StoreConfig(url=url)
    except ValidationError:
        raise ConfigError(f"{name} must be sqlite:///FILE or postgresql://USER@HOST/DATABASE") from None


def all_tables() -> list[Table]:
    """Return the tables of a store except `schema_numbers`, which every new store gets anyway."""
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'schema_numbers' ORDER BY rowid"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as schema:
        sqlite_file.make_tables(schema, "")
        tables = []
        for (name,) in schema.execute(names).fetchall():
            columns = [(row[1], row[5]) for row in schema.execute(f"PRAGMA table_info({name})")]  # its place in the key
            key = sorted((place, column) for column, place in columns if place)
            tables.append(Table(name, tuple(column for column, _ in columns), tuple(column for _, column in key)))
    return tables


async def _compared(table: Table, source: FileStore | ServerStore, target: FileStore | ServerStore) -> int:
    """Compare the rows of a table in both stores, in order. Return their number."""
    there, rows = target.read(table), 0
    async for batch in source.read(table):
        rows += len(batch)
        kept = target.kept(batch)
        found: Rows = await anext(there, [])
        if kept != found:
            row = next(one for one, other in zip_longest(kept, found) if one != other) or kept[-1]
            what = dict(zip(table.columns, row, strict=True))
            where = ", ".join(f"{column} {what[column]!r}" for column in table.key)
            raise LightningError(f"a row of {table.name} differs in the copy: {where}. Nothing was moved")
    if await anext(there, None) is not None:
        raise LightningError(f"{table.name} has more rows in the copy than in the source. Nothing was moved")
    typer.echo(f"{table.name}: {count(rows)} rows")
    return rows


class FileStore:
    """A store in a file: a snapshot, or a new store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def read(self, table: Table) -> AsyncIterator[Rows]:
        cursor = self._connection.execute(table.read)
        while rows := cursor.fetchmany(BATCH):
            yield [tuple(row) for row in rows]

    async def fill(self, table: Table, rows: Rows) -> None:
        self._connection.executemany(table.insert("?"), rows)

    def kept(self, rows: Rows) -> Rows:
        return rows


@asynccontextmanager
async def file_to_read(config: StoreConfig) -> AsyncIterator[FileStore]:
    """Yield a snapshot of the store. Processes that already have it open may keep writing."""
    path = config.path.absolute()
    if not path.is_file():
        raise LightningError(f"there is no store at {path}")
    idle = None if sqlite_file.is_in_use(path) else sqlite_file.IdleFile(path)
    with closing(sqlite_file.connect_to_read(path, config.busy_timeout_s)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM policy_log").fetchone()  # that moment
        yield FileStore(connection)
    if idle is not None and idle.is_written():
        raise LightningError(f"{path} was written to during the copy: stop the proxy and the trainer, and try again")


@asynccontextmanager
async def new_file(config: StoreConfig) -> AsyncIterator[FileStore]:
    """Yield an empty store, which gets its file name after the block. Raise LightningError if the file exists."""
    path = config.path.absolute()
    _require_none(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.part")
    with sqlite_file.lock_file(lock, "lock") as ours:
        if not ours:
            raise LightningError(f"another process is moving a store to {path}")
        try:
            with sqlite_file.new_store(path) as part:
                sqlite_file.make_private(part)
                with closing(sqlite3.connect(part, isolation_level=None)) as connection:
                    # It is synced once before it gets its name.
                    for pragma in ("auto_vacuum = INCREMENTAL", "synchronous = OFF", "journal_mode = OFF"):
                        connection.execute(f"PRAGMA {pragma}")
                    sqlite_file.make_tables(connection, "")
                    # Triggers note what happens, not what is moved.
                    triggers = connection.execute(
                        "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
                    ).fetchall()
                    for name, _ in triggers:
                        connection.execute(f"DROP TRIGGER {name}")
                    for table in reversed(all_tables()):
                        connection.execute(f"DELETE FROM {table.name}")
                    connection.execute("BEGIN")
                    yield FileStore(connection)
                    if wrong := connection.execute("PRAGMA foreign_key_check").fetchone():
                        raise LightningError(f"a row of {wrong[0]} refers to a row of {wrong[2]} that does not exist")
                    connection.execute("COMMIT")
                    for _, sql in triggers:
                        connection.execute(sql)
                _require_none(path)
        finally:
            Path(f"{lock}-lock").unlink(missing_ok=True)


def _require_none(path: Path) -> None:
    if any(path.with_name(path.name + suffix).exists() for suffix in sqlite_file.FILES):
        raise LightningError(f"{path} already exists: name a new file")


class ServerStore:
    """A store on a PostgreSQL server, which is read or written in one transaction."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def read(self, table: Table) -> AsyncIterator[Rows]:
        rows: Rows = []
        # Iterated to its end: a cursor that stays open keeps its table from being altered.
        async for row in self._connection.cursor(FEED if table.name == "feed" else table.read, prefetch=BATCH):
            rows.append(tuple(row))
            if len(rows) == BATCH:
                yield rows
                rows = []
        if rows:
            yield rows

    async def fill(self, table: Table, rows: Rows) -> None:
        await self._connection.executemany(table.insert("${}"), rows)

    def kept(self, rows: Rows) -> Rows:
        from ..store.postgres.statements import storable

        return [tuple(storable(value) for value in row) for row in rows]


@asynccontextmanager
async def server_to_read(config: StoreConfig) -> AsyncIterator[ServerStore]:
    """Yield a snapshot of the store; others may keep writing to it."""
    from ..store.postgres.database import missing_in

    async with _connected(config) as connection, connection.transaction(isolation="repeatable_read", readonly=True):
        require_all(config.where, await missing_in(connection, config.where))
        yield ServerStore(connection)


@asynccontextmanager
async def new_on_server(config: StoreConfig) -> AsyncIterator[ServerStore]:
    """Yield an empty store, which others see after the block. Raise LightningError if the database has tables."""
    from ..store.postgres import database

    async with _connected(config) as connection, connection.transaction():
        await connection.execute(database.LOCK_SCHEMA)
        if await connection.fetch(database.TABLES):
            raise StoreUnavailable(f"{config.where} already has tables: name an empty database")
        await database.make_tables(connection, config.where)
        # Triggers note what happens, not what is moved. The server keeps checking foreign keys.
        tables = [name for (name,) in await connection.fetch(database.TABLES)]
        for table in tables:
            await connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        for table in ("policy_log", "policy_versions", "returns"):  # which a new store has rows in
            await connection.execute(f"DELETE FROM {table}")
        yield ServerStore(connection)
        for table, column in await connection.fetch(IDENTITIES):  # the next numbers are above those moved
            sequence = f"pg_get_serial_sequence('{table}', '{column}')"
            await connection.execute(f"SELECT setval({sequence}, MAX({column})) FROM {table}")
        for table in tables:
            await connection.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
        await connection.execute("ANALYZE")


@asynccontextmanager
async def _connected(config: StoreConfig) -> AsyncIterator[asyncpg.Connection]:
    import asyncpg

    connection = await asyncpg.connect(config.url, timeout=config.busy_timeout_s, server_settings=SETTINGS)
    try:
        yield connection
    except asyncpg.InterfaceError as error:
        if connection.is_closed():
            raise ConnectionError("the server closed the connection") from error
        raise
    finally:
        if connection.is_in_transaction():
            connection.terminate()
        else:
            await connection.close()
