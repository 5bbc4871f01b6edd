"""A transaction's statements as async functions that never wait, so that a thread without an event loop runs them."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Generator, Sequence
from typing import TypeVar

from ..database import Params

T = TypeVar("T")


class SqliteTransaction:
    """The statements of a transaction that has begun on a connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def all(self, sql: str, params: Params | None = None) -> list[sqlite3.Row]:
        return self._connection.execute(sql, params or {}).fetchall()

    async def one(self, sql: str, params: Params | None = None) -> sqlite3.Row | None:
        # All rows: a statement that writes and returns is done only when they are read.
        rows = self._connection.execute(sql, params or {}).fetchall()
        return rows[0] if rows else None

    async def run(self, sql: str, params: Params | None = None) -> int:
        return self._connection.execute(sql, params or {}).rowcount

    async def many(self, sql: str, rows: Sequence[Params]) -> list[sqlite3.Row]:
        return [row for params in rows for row in self._connection.execute(sql, params)]


def finish(work: Awaitable[T]) -> T:
    """Return what `work` returns, which awaits nothing but statements of its transaction."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as ended:
        done: T = ended.value
        return done
    if isinstance(steps, Generator):
        steps.close()
    raise RuntimeError("a transaction awaited something else than its own statements")
