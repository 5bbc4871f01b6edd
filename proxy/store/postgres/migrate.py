"""The schema in PostgreSQL: numbered scripts in `migrations/`, whose numbers are those of SQLite's, and of rooms."""

from __future__ import annotations

import asyncpg

from ...errors import OtherSchema, StoreUnavailable
from ..scripts import HOUSE, MAKE_ROOMS, ROOM_SEEN, ROOMS_SEEN, RoomScripts, Scripts, scripts_in
from .translate import translated

LOCK = "SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ':migration', 0))"


async def migrate(connection: asyncpg.Connection, where: str) -> None:
    """Run the scripts that this store has not seen, in one transaction: several processes may start at once.

    Raise StoreUnavailable for a schema that is not ours to use. Nothing is written to it.
    """
    scripts, rooms = _scripts(), RoomScripts("postgres")
    if await _version(connection, where) == max(scripts) and not rooms.unseen(await _rooms_seen(connection)):
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
        for room, number, script in rooms.unseen(await _rooms_seen(connection)):
            await connection.execute(script)
            await connection.execute(MAKE_ROOMS)
            await connection.execute(translated(ROOM_SEEN).text, room, number)


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
    if version < max(_scripts()) or RoomScripts("postgres").unseen(await _rooms_seen(connection)):
        raise OtherSchema(
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
    if version > max(_scripts()) or RoomScripts("postgres").is_newer(await _rooms_seen(connection)):
        raise OtherSchema(
            f"store {where} cannot be opened: a newer lightning-proxy has worked on it; update this one, or set "
            "store.url"
        )
    return version


async def _rooms_seen(connection: asyncpg.Connection) -> dict[str, int]:
    """By room: its last script that this store has seen."""
    if await connection.fetchval("SELECT to_regclass(current_schema() || '.room_migrations') IS NULL"):
        return {}
    return {row["room"]: row["number"] for row in await connection.fetch(ROOMS_SEEN)}


def _scripts() -> Scripts:
    return scripts_in(HOUSE / "store" / "postgres" / "migrations")
