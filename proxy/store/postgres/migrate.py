"""The schema in PostgreSQL: numbered scripts in `migrations/`, whose numbers are those of SQLite's."""

from __future__ import annotations

import re
from importlib import resources

import asyncpg

from ...errors import StoreUnavailable

LOCK = "SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ':migration', 0))"


async def migrate(connection: asyncpg.Connection, where: str) -> None:
    """Run the scripts that this store has not seen, in one transaction: several processes may start at once.

    Raise StoreUnavailable for a schema that is not ours to use. Nothing is written to it.
    """
    scripts = _scripts()
    if await _version(connection, where) == max(scripts):
        return
    async with connection.transaction():
        await connection.execute(LOCK)
        version = await _version(connection, where)
        if version == 0:
            await connection.execute("CREATE TABLE lightning_store (version BIGINT NOT NULL)")
            await connection.execute("INSERT INTO lightning_store VALUES (0)")
        for number, script in sorted(scripts.items()):
            if number > version:
                await connection.execute(script)
        await connection.execute("UPDATE lightning_store SET version = $1", max(scripts))


async def require_empty(connection: asyncpg.Connection, where: str) -> None:
    """Raise StoreUnavailable unless the schema is empty. It stays so until this transaction ends."""
    await connection.execute(LOCK)
    if await _version(connection, where):
        raise StoreUnavailable(f"there is a store at {where} already: a store is moved to an empty database")


async def require_up_to_date(connection: asyncpg.Connection, where: str) -> None:
    """Raise StoreUnavailable for a store that is missing, or has to be migrated first."""
    version = await _version(connection, where)
    if version == 0:
        raise StoreUnavailable(f"there is no store at {where}")
    if version < max(_scripts()):
        raise StoreUnavailable(
            f"store {where} cannot be opened: an earlier lightning-proxy worked on it last; "
            "`lightning-proxy serve` brings it up to date"
        )


async def _version(connection: asyncpg.Connection, where: str) -> int:
    """The newest script that was run; 0 in an empty schema."""
    missing = "SELECT to_regclass(current_schema() || '.lightning_store') IS NULL"
    if await connection.fetchval(missing):
        tables = "SELECT COUNT(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
        if not await connection.fetchval(tables):
            return 0
        if await connection.fetchval(missing):  # else another process has made them meanwhile, all at once
            raise StoreUnavailable(
                f"store {where} cannot be opened: it belongs to another program; set store.url to another database"
            )
    version = int(await connection.fetchval("SELECT version FROM lightning_store"))
    if version > max(_scripts()):
        raise StoreUnavailable(
            f"store {where} cannot be opened: a newer lightning-proxy has worked on it; update this one, or set "
            "store.url"
        )
    return version


def _scripts() -> dict[int, str]:
    files = resources.files("lightning_proxy.proxy.store.postgres").joinpath("migrations").iterdir()
    return {int(match[1]): file.read_text() for file in files if (match := re.match(r"(\d{4})_.*\.sql", file.name))}
