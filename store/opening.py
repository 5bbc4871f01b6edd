"""Opens the database that a configuration names: an SQLite file or a PostgreSQL server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..core.config.server import StoreConfig
from ..core.errors import StoreUnavailable
from .database import Database
from .sqlite.database import SqliteDatabase


async def open_database(config: StoreConfig, *, to_write: bool = True) -> Database:
    """Open the store, making its tables as needed. Raise StoreUnavailable when that cannot be done.

    Without `to_write` nothing can be written, and a store that has not all tables is StoreUnavailable, too.
    """
    kind = _postgres() if config.is_postgres else SqliteDatabase
    return await (kind.open_to_write(config) if to_write else kind.open_as_it_is(config))


def _postgres() -> type[Database]:
    try:
        from .postgres.database import PostgresDatabase
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise StoreUnavailable(
            "store.url postgresql://… needs asyncpg: pip install 'lightning-proxy[postgres]'"
        ) from None
    return PostgresDatabase


@asynccontextmanager
async def opened(config: StoreConfig, *, to_write: bool = True) -> AsyncIterator[Database]:
    """Yield the store of a configuration, and close it at the end."""
    database = await open_database(config, to_write=to_write)
    try:
        yield database
    finally:
        await database.close()
