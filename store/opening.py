"""Opens the database that a configuration names: an SQLite file or a PostgreSQL server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from ..core.config.server import StoreConfig
from ..core.errors import StoreUnavailable
from .database import Database
from .sqlite.database import SqliteDatabase


async def open_database(config: StoreConfig, *, to_write: bool = True) -> Database:
    """Open the store, creating its tables as needed. Raises StoreUnavailable if that fails.

    Without `to_write`, nothing can be written, and a store that lacks tables raises StoreUnavailable too.
    """
    if not config.is_postgres:
        return await SqliteDatabase.open(config, to_write=to_write)
    try:
        from .postgres.database import PostgresDatabase
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        asyncpg = "store.url postgresql://… needs asyncpg: pip install 'lightning-proxy[postgres]'"
        raise StoreUnavailable(asyncpg) from None
    return await PostgresDatabase.open(config, to_write=to_write)


@asynccontextmanager
async def opened(config: StoreConfig, *, to_write: bool = True) -> AsyncIterator[Database]:
    database = await open_database(config, to_write=to_write)
    try:
        yield database
    finally:
        await database.close()


def first_value(config: StoreConfig, statement: str) -> Any:
    """Return a query's first value as a string; None if there is none or the store cannot be read."""

    async def ask() -> Any:
        async with opened(config, to_write=False) as database:
            return await database.value(str, statement)

    with ThreadPoolExecutor(1) as thread:  # an event loop that runs here cannot run another
        try:
            return thread.submit(asyncio.run, ask()).result()
        except StoreUnavailable:  # whoever opens it for good says what is wrong
            return None
