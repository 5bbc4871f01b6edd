"""The interface of a database: atomic transactions, rows as records, and the log of changes."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol, TypeVar, get_origin, get_type_hints

from ..core.errors import StoreUnavailable
from ..core.http import in_thread_if_large
from ..core.json_text import loads, loads_rounded

log = logging.getLogger(__name__)

T = TypeVar("T")
Params = Mapping[str, object]
Runs = Sequence[tuple[str, Sequence[dict[str, Any]]]]

SMALL = 2**14  # bytes of a write, by default
WRITTEN, PAUSE = 2**20, 4  # of `in_passing`: bytes of a transaction, about; the pause after it, in its own durations
REFUSED_S = 5.0  # for which a record that could not be written makes the store not ready
TELL_S = 60.0
LOOK_S = 5.0  # between two looks without a notice: the writer may have ended before it sent one

# If it is True, no statement of the task takes longer than `store.busy_timeout_s`: somebody waits for the answer.
HURRIED: ContextVar[bool] = ContextVar("hurried", default=False)


class Writing:
    """Tracks whether records can be written, for the readiness route. Logs problems at most once a minute."""

    def __init__(self) -> None:
        self.why: str | None = None  # the newest record could not be written
        self._at = self._logged_at = -TELL_S
        self._logged = False

    def failed(self, why: str) -> None:
        self.why, self._at = why, time.monotonic()
        if self._at >= self._logged_at + TELL_S:
            self._logged_at, self._logged = self._at, True
            log.error("records cannot be written; requests that need a record are refused (503): %s", why)

    def succeeded(self) -> None:
        if self._logged:
            log.warning("records can be written again")
        self.why, self._logged = None, False

    def require(self, has_room: bool = True) -> None:
        """Raise StoreUnavailable if the last write failed, unless that was a while ago and the disk has room."""
        if self.why is not None and (time.monotonic() < self._at + REFUSED_S or not has_room):
            raise StoreUnavailable(f"the newest record could not be written: {self.why}")
        self.succeeded()


class ConstraintRefused(Exception):
    """A constraint of the schema refused a row. Its transaction wrote nothing."""


def unavailable(what: str, why: object) -> StoreUnavailable:
    """Return the error for a store that cannot be `what` ("written", "read" or "reached")."""
    nothing = "; nothing was recorded, try again" if what == "written" else ""
    return StoreUnavailable(f"the store cannot be {what}: {why}{nothing}")


class Row(Protocol):
    def __getitem__(self, column: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def keys(self) -> Any: ...


class Reads(ABC):
    """Answers queries. Parameters are written `:name`; parameters that a query does not use are ignored."""

    @abstractmethod
    async def all(self, sql: str, params: Params | None = None) -> Sequence[Row]:
        """Return all rows of a statement; for one that writes, its RETURNING rows."""

    async def one(self, sql: str, params: Params | None = None) -> Row | None:
        rows = await self.all(sql, params)
        return rows[0] if rows else None


class Transaction(Reads):
    """Runs the statements of one transaction. Its work may await nothing else: SQLite's thread has no event loop."""

    async def many(self, sql: str, rows: Sequence[Params]) -> Sequence[Row]:
        """Run a statement once for each row of parameters; return all rows that it returned."""
        return [row for params in rows for row in await self.all(sql, params)]


Work = Callable[[Transaction], Coroutine[Any, Any, T]]


class Database(Reads):
    """An open database. `where`: its location, for display.

    Methods raise StoreUnavailable if it cannot be reached, read or written, and ConstraintRefused for a refused row.
    """

    where: str
    damage: str | None = None  # what is wrong with its file, as far as was seen

    async def look_for_damage(self) -> None:
        """Check a database file once for damage, and note what is found in `damage` and in the log."""

    @abstractmethod
    async def close(self) -> None:
        """Close the database once running work has ended."""

    @abstractmethod
    async def commit(self, runs: Runs, size: int = SMALL) -> None:
        """Run statements, each with many parameter rows, in one transaction that writes about `size` bytes."""

    @abstractmethod
    async def write(self, work: Work[T], size: int = SMALL) -> T:
        """Do `work` in one transaction that writes about `size` bytes, and return its result."""

    async def value(self, kind: Callable[[Any], T], sql: str, **params: object) -> T | None:
        """Return a query's first value, converted by `kind`; None if there is no row or the value is NULL."""
        return kind(row[0]) if (row := await self.one(sql, params)) and row[0] is not None else None

    async def record(self, kind: type[T], sql: str, **params: object) -> T | None:
        return read(kind, row) if (row := await self.one(sql, params)) else None

    async def records(self, kind: type[T], sql: str, **params: object) -> list[T]:
        rows = await self.all(sql, params)
        size = sum(len(value) for row in rows for value in row if isinstance(value, str))
        return await in_thread_if_large(size, lambda: [read(kind, row) for row in rows])

    async def execute(self, sql: str, **params: object) -> None:
        await self.commit([(sql, [params])])

    @abstractmethod
    async def quick(self, sql: str, params: Params | None = None) -> Row | None:
        """Return the first row of a short query that calls wait for, or None. Long queries do not delay it."""

    @abstractmethod
    async def require_writable(self) -> None:
        """Raise StoreUnavailable if a record could not be committed now."""

    async def checkpoint(self) -> None:
        """Write committed data to the database file. Database servers do so by themselves."""

    async def forget_deleted(self) -> None:
        """Purge deleted rows from the database's log. Database servers do so by themselves."""

    @abstractmethod
    def lock(self, work: str) -> AbstractAsyncContextManager[bool]:
        """Yield whether this process got the lock for this work. It holds the lock until the block ends.

        If the lock is on a server and the connection to it breaks, the block is cancelled and raises StoreUnavailable.
        """


class Records:
    """Reads and writes records of one kind."""

    def __init__(self, database: Database) -> None:
        self._db = database


async def in_passing(database: Database, work: Work[T]) -> T:
    """Do short `work` in a transaction, then let others write for `PAUSE` times as long."""
    began = 0.0

    async def timed(db: Transaction) -> T:
        nonlocal began
        began = time.perf_counter()
        return await work(db)

    done = await database.write(timed, WRITTEN)
    await asyncio.sleep(PAUSE * (time.perf_counter() - began))
    return done


async def all_in_passing(database: Database, statement: str, params: Params) -> Sequence[Row]:
    """Run a statement that writes a few rows as `in_passing` does. Return all rows that it returns."""
    return await in_passing(database, lambda db: db.all(statement, params))


def read(kind: type[T], row: Row, **made: Any) -> T:
    """Return a row as a record (a dataclass or a NamedTuple), whose fields are the columns of the same names.

    JSON lists and objects are decoded, and 0 and 1 become booleans in boolean fields. `made`: the other fields.
    """
    for name, decode in _columns(kind):  # type: ignore[arg-type]
        if name not in made:
            value = row[name]
            made[name] = value if decode is None or value is None else decode(value)
    return kind(**made)


@cache
def _columns(kind: type[Any]) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """The fields of a record type, each with the function that decodes its column."""
    return tuple((name, _decoder(name, hint)) for name, hint in get_type_hints(kind).items())


def _decoder(name: str, hint: Any) -> Callable[[Any], Any] | None:
    if name == "metrics":  # numbers of ours: floats
        return loads_rounded
    if get_origin(hint) in (dict, list):
        return loads
    return bool if hint in (bool, bool | None) else None


FEED_KNOWS = """
SELECT :cursor BETWEEN COALESCE((SELECT MIN(n) - 1 FROM feed), 0) AND COALESCE((SELECT MAX(n) FROM feed), 0)
"""
FEED_NEWEST = "SELECT MAX(n) AS newest FROM feed /* PostgreSQL: SELECT feed_newest() AS newest */"


class Feed(Records):
    """The log of changes in the store: the newest 10,000 events in commit order. Triggers write it."""

    async def newest(self) -> int:
        """Return the number of the last event; 0 if there is none."""
        row = await self._db.quick(FEED_NEWEST)
        return (row and row[0]) or 0

    async def knows(self, cursor: int) -> bool:
        """Return whether all events after `cursor` are still stored."""
        return bool(await self._db.value(bool, FEED_KNOWS, cursor=cursor))
