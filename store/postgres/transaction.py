"""The statements of a transaction on a connection to PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from ..database import Params
from .translate import Numbered, translated

NO_PARAMS: Params = {}


class PostgresTransaction:
    """The statements of a transaction that has begun on a connection, or single statements without one."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def all(self, sql: str, params: Params | None = None) -> list[asyncpg.Record]:
        statement = translated(sql)
        return await self._connection.fetch(statement.text, *_values(statement, params or NO_PARAMS))

    async def one(self, sql: str, params: Params | None = None) -> asyncpg.Record | None:
        rows = await self.all(sql, params)
        return rows[0] if rows else None

    async def run(self, sql: str, params: Params | None = None) -> int:
        statement = translated(sql)
        done: str = await self._connection.execute(statement.text, *_values(statement, params or NO_PARAMS))
        return int(done.rsplit(" ", 1)[1])  # such as "UPDATE 3"

    async def many(self, sql: str, rows: Sequence[Params]) -> list[asyncpg.Record]:
        if len(rows) < 2:
            return await self.all(sql, rows[0]) if rows else []
        statement = translated(sql)
        return await self._connection.fetchmany(statement.text, [_values(statement, row) for row in rows])


def _values(statement: Numbered, params: Params) -> list[Any]:
    return [storable(params[name]) for name in statement.names]


def storable(value: Any) -> Any:
    """A value as PostgreSQL can keep it: it has no character 0. Raise UnicodeEncodeError for what UTF-8 cannot hold."""
    if not isinstance(value, str):
        return value
    if not value.isascii():
        value.encode()
    return value.replace("\0", "?")
