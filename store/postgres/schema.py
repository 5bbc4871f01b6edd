"""Makes the tables of a store on a PostgreSQL server, and checks those that are there."""

from __future__ import annotations

import asyncpg

from ..schema import NUMBERS, missing_parts, parts

LOCK = "SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ':schema', 0))"
TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"


async def missing_in(connection: asyncpg.Connection, where: str) -> list[str]:
    """Return the rooms whose tables the database does not have yet. Raise OtherSchema if it is none of this schema."""
    tables = {row[0] for row in await connection.fetch(TABLES)}
    rows = await connection.fetch(NUMBERS) if "schema_numbers" in tables else []
    return missing_parts(where, tables, {row["room"]: row["number"] for row in rows})


async def make_tables(connection: asyncpg.Connection, where: str) -> None:
    """Make the tables that are missing, in one transaction: several processes may start at once."""
    if not await missing_in(connection, where):
        return
    async with connection.transaction():
        await connection.execute(LOCK)
        missing = await missing_in(connection, where)
        for part in parts("postgres"):
            if part.room in missing:
                await connection.execute(part.script)
