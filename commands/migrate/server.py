"""A store on a PostgreSQL server, read as of one moment, or made in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ...store.postgres.database import LOCK_SCHEMA, TABLES, make_tables, missing_in
from ...store.postgres.statements import storable
from ...store.schema import require_all
from .file import BATCH, Record, Table, quoted

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


class ServerStore:
    """A transaction on a connection to the server."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def count(self, table: Table) -> int:
        also = " + (SELECT COUNT(*) FROM feed_in)" if table.name == "feed" else ""
        return int(await self._connection.fetchval(f"SELECT (SELECT COUNT(*) FROM {table.name}){also}"))

    async def read(self, table: Table) -> AsyncIterator[Record]:
        sql = f"SELECT {quoted(table.columns)} FROM {table.name} ORDER BY {quoted(table.key)}"
        async for row in self._connection.cursor(FEED if table.name == "feed" else sql, prefetch=BATCH):
            yield tuple(row)

    def require_unchanged(self) -> None:
        """Do nothing: the transaction sees one moment."""

    async def fill(self, table: Table, records: AsyncIterable[Record]) -> None:
        kept = (self.kept(record) async for record in records)
        copying = self._connection.copy_records_to_table(table.name, records=kept, columns=table.columns)
        await _unless_lost(self._connection, copying)

    def kept(self, record: Record) -> Record:
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
    async with _connected(config) as connection, connection.transaction(isolation="repeatable_read", readonly=True):
        require_all(config.where, await missing_in(connection, config.where))
        yield ServerStore(connection)


@asynccontextmanager
async def new_on_server(config: StoreConfig) -> AsyncIterator[ServerStore]:
    """Yield an empty store, which others see after the block. Raise LightningError where there is one."""
    async with _connected(config) as connection, connection.transaction():
        await connection.execute(LOCK_SCHEMA)
        if await connection.fetch(TABLES):
            raise StoreUnavailable(f"there are tables at {config.where} already: a store is moved to an empty database")
        await make_tables(connection, config.where)
        await _switch_triggers(connection, "DISABLE")
        await connection.execute("DELETE FROM policy_log")
        await connection.execute("DELETE FROM policy_versions")
        await connection.execute("DELETE FROM returns")
        yield ServerStore(connection)


@asynccontextmanager
async def _connected(config: StoreConfig) -> AsyncIterator[asyncpg.Connection]:
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
    for (table,) in await connection.fetch(TABLES):
        await connection.execute(f"ALTER TABLE {table} {to} TRIGGER USER")
