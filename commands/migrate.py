"""`store migrate`: moves a store from an SQLite file to a PostgreSQL server, or back, and compares each row of it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import ValidationError

from ..core.config.server import StoreConfig
from ..core.errors import ConfigError, LightningError, StoreUnavailable
from ..store.schema import require_all
from ..store.sqlite.file import (
    FILES,
    IdleFile,
    connect_to_read,
    is_in_use,
    lock_file,
    make_private,
    make_tables,
    new_store,
)
from .formats import count

if TYPE_CHECKING:
    import asyncpg

Record = tuple[Any, ...]

BATCH = 200  # rows; those of `calls` may be large
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
    """A table. `columns`: in the order of a record; `key`: those that order its rows, each row at another place."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def listed(self) -> str:
        return ", ".join(f'"{column}"' for column in self.columns)

    @property
    def rows(self) -> str:
        """The statement that reads its rows, in order."""
        order = ", ".join(f'"{column}"' for column in self.key)
        return f"SELECT {self.listed} FROM {self.name} ORDER BY {order}"


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

    reading = server_to_read(source) if source.is_postgres else file_to_read(source)
    making = new_on_server(target) if target.is_postgres else new_file(target)
    rows = 0
    try:
        async with reading as old, making as new:
            for table in all_tables():
                await new.fill(table, old.read(table))
                rows += await _compared(table, old, new)
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
        return _tables_of(schema)


def _tables_of(schema: sqlite3.Connection) -> list[Table]:
    """The tables of an SQLite store, but for `schema_numbers`, which each store has for itself."""
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'schema_numbers' ORDER BY rowid"
    tables = []
    for (name,) in schema.execute(names).fetchall():
        columns = [(row[1], row[5]) for row in schema.execute(f"PRAGMA table_info({name})")]  # and its place in the key
        key = sorted((place, column) for column, place in columns if place)
        tables.append(Table(name, tuple(column for column, _ in columns), tuple(column for _, column in key)))
    return tables


async def _compared(table: Table, source: FileStore | ServerStore, target: FileStore | ServerStore) -> int:
    """Compare the rows of a table in both, in their order. Return how many they are."""
    there, rows = target.read(table), 0
    async for record in source.read(table):
        rows += 1
        if target.kept(record) != await anext(there, None):
            what = dict(zip(table.columns, record, strict=True))
            where = ", ".join(f"{column} {what[column]!r}" for column in table.key)
            raise LightningError(f"a row of {table.name} was read back differently: {where}. Nothing was moved")
    if await anext(there, None) is not None:
        raise LightningError(f"{table.name} was read back with more rows than it has. Nothing was moved")
    typer.echo(f"{table.name}: {count(rows)} rows")
    return rows


class FileStore:
    """A store in a file as it was at one moment, or a new one. `idle`: where nobody may write to it meanwhile."""

    def __init__(self, connection: sqlite3.Connection, path: Path, idle: IdleFile | None = None) -> None:
        self._connection = connection
        self._path = path
        self._idle = idle

    async def read(self, table: Table) -> AsyncIterator[Record]:
        cursor = self._connection.execute(table.rows)
        while rows := cursor.fetchmany(BATCH):
            for row in rows:
                yield tuple(row)

    def require_unchanged(self) -> None:
        """Raise LightningError if what was read may not be of one moment."""
        if self._idle is not None and self._idle.is_written():
            raise LightningError(
                f"{self._path} was written to meanwhile: stop the proxy and the trainer, and try again"
            )

    async def fill(self, table: Table, records: AsyncIterator[Record]) -> None:
        places = ", ".join("?" * len(table.columns))
        sql = f"INSERT INTO {table.name} ({table.listed}) VALUES ({places})"
        async for record in records:
            self._connection.execute(sql, record)

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
    for table in reversed(_tables_of(connection)):
        connection.execute(f"DELETE FROM {table.name}")
    yield
    for _, sql in triggers:
        connection.execute(sql)


def _require_none(path: Path) -> None:
    if any(path.with_name(path.name + suffix).exists() for suffix in FILES):
        raise LightningError(f"there is something at {path} already: a store is moved to a new file")


class ServerStore:
    """A store on a server: a transaction on a connection to it, which sees one moment."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def read(self, table: Table) -> AsyncIterator[Record]:
        sql = FEED if table.name == "feed" else table.rows
        async for row in self._connection.cursor(sql, prefetch=BATCH):
            yield tuple(row)

    def require_unchanged(self) -> None:
        """Do nothing: the transaction sees one moment."""

    async def fill(self, table: Table, records: AsyncIterator[Record]) -> None:
        kept = (self.kept(record) async for record in records)
        copying = self._connection.copy_records_to_table(table.name, records=kept, columns=table.columns)
        await _unless_lost(self._connection, copying)

    def kept(self, record: Record) -> Record:
        from ..store.postgres.statements import storable

        return tuple(storable(value) for value in record)

    async def finish(self) -> None:
        """Set sequences above the highest number moved, and let triggers note changes from now on."""
        for table, column in await self._connection.fetch(IDENTITIES):
            sequence = f"pg_get_serial_sequence('{table}', '{column}')"
            await self._connection.execute(f"SELECT setval({sequence}, MAX({column})) FROM {table}")
        await _switch_triggers(self._connection, "ENABLE")
        await self._connection.execute("ANALYZE")


@asynccontextmanager
async def server_to_read(config: StoreConfig) -> AsyncIterator[ServerStore]:
    """Yield a snapshot of the store; others may keep writing to it."""
    from ..store.postgres.database import missing_in

    async with _connected(config) as connection, connection.transaction(isolation="repeatable_read", readonly=True):
        require_all(config.where, await missing_in(connection, config.where))
        yield ServerStore(connection)


@asynccontextmanager
async def new_on_server(config: StoreConfig) -> AsyncIterator[ServerStore]:
    """Yield an empty store, which others see after the block. Raise LightningError where there is one."""
    from ..store.postgres import database

    async with _connected(config) as connection, connection.transaction():
        await connection.execute(database.LOCK_SCHEMA)
        if await connection.fetch(database.TABLES):
            raise StoreUnavailable(f"there are tables at {config.where} already: a store is moved to an empty database")
        await database.make_tables(connection, config.where)
        await _switch_triggers(connection, "DISABLE")
        for table in ("policy_log", "policy_versions", "returns"):  # which a new store has rows in
            await connection.execute(f"DELETE FROM {table}")
        yield ServerStore(connection)


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


async def _unless_lost(connection: asyncpg.Connection, copying: Coroutine[Any, Any, object]) -> None:
    """Wait for what would wait for ever once the server is gone: asyncpg does not tell a COPY."""
    task = asyncio.ensure_future(copying)
    lost = asyncio.Event()

    def ended(_: object) -> None:
        lost.set()
        task.cancel()

    connection.add_termination_listener(ended)
    try:
        await task
    except asyncio.CancelledError:
        if not lost.is_set():
            raise
        raise ConnectionError("the server closed the connection") from None
    finally:
        connection.remove_termination_listener(ended)


async def _switch_triggers(connection: asyncpg.Connection, to: str) -> None:
    """The triggers of the store, which note changes. The server keeps checking foreign keys."""
    from ..store.postgres.database import TABLES

    for (table,) in await connection.fetch(TABLES):
        await connection.execute(f"ALTER TABLE {table} {to} TRIGGER USER")
