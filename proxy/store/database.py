"""One SQLite file: opened, migrated, and written in transactions that are wholly there or not at all."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import aiosqlite
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random

from ..config.server import StoreConfig
from ..errors import StoreUnavailable

S = TypeVar("S")
T = TypeVar("T")
Runs = Sequence[tuple[str, Sequence[dict[str, Any]]]]

CHECKPOINT_EVERY = 200  # commits
LARGE = 2**18  # bytes
LONG_LOG = 2**26  # bytes of write-ahead log, from which on everybody waits for a moment so that it begins anew


class Database:
    """A write connection behind a lock, and a read connection that never waits for it (WAL).

    aiosqlite takes every statement to its thread and back, where it waits for Python's lock again and again while the
    event loop is busy. What is needed for every call is done at once instead (`commit`, `one_now`): it takes less time
    than the way to a thread. What may take long is not: a store that is locked or synced at each commit, large records.
    """

    def __init__(
        self, path: Path, writer: aiosqlite.Connection, reader: aiosqlite.Connection, config: StoreConfig
    ) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._here = _connect_here(path, config, wait=False)
        self._there = _connect_here(path, config, wait=True)  # in `self._thread`
        self._thread = ThreadPoolExecutor(1, "store")
        self._syncs = config.synchronous == "full"
        self._commits = self._written = 0  # since the last checkpoint; bytes, about
        self._checkpoint: asyncio.Future[None] | None = None
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, config: StoreConfig) -> Database:
        """Open the file, creating and migrating it as needed; raises StoreUnavailable when that cannot be done."""
        path = config.path.expanduser().absolute()
        writer: aiosqlite.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = await _connect(path, config)
            await _migrate(writer)
            reader = await _connect(path, config)
            return cls(path, writer, reader, config)
        except BaseException as error:
            if writer is not None:
                await writer.close()
            if isinstance(error, OSError | sqlite3.Error):
                raise StoreUnavailable(f"store {path} cannot be opened: {error}") from error
            raise

    async def close(self) -> None:
        async with self._lock:
            await self._writer.close()
            await self._reader.close()
            self._thread.shutdown()
            self._here.close()
            self._there.close()

    async def commit(self, runs: Runs, size: int = 0) -> None:
        """Run statements, each with many rows of parameters, in one transaction; errors as those of `transaction`.

        `size`: about how many bytes that writes.
        """
        async with self._lock:
            try:
                if self._syncs or size > LARGE or not _try_commit(self._here, runs):
                    await self._in_thread(_commit, runs)
            except sqlite3.DatabaseError as error:
                _raise_ours(error, "written")
        self._committed(size)

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in one transaction; errors as those of `transaction`.

        For many statements that need each other's answers: in a thread, but without the way there and back for each.
        """
        async with self._lock:
            try:
                done = await self._in_thread(_in_transaction, work)
            except sqlite3.DatabaseError as error:
                _raise_ours(error, "written")
        self._committed(0)
        return done

    def _committed(self, size: int) -> None:
        self._commits, self._written = self._commits + 1, self._written + size
        due = self._commits >= CHECKPOINT_EVERY or self._written >= LONG_LOG // 4
        if due and (self._checkpoint is None or self._checkpoint.done()):
            self._commits = self._written = 0
            self._checkpoint = asyncio.get_running_loop().run_in_executor(self._thread, _checkpoint, self._there)

    async def _in_thread(self, work: Callable[[sqlite3.Connection, S], T], what: S) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, self._there, what))

    def one_now(self, sql: str, params: Mapping[str, object] | None = None) -> sqlite3.Row | None:
        """The first row of a query that is quick: it is run at once, in the caller's thread."""
        try:
            row: sqlite3.Row | None = self._here.execute(sql, params or {}).fetchone()
        except sqlite3.DatabaseError as error:
            _raise_ours(error, "read")
        return row

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[aiosqlite.Connection]:
        """The write connection inside BEGIN IMMEDIATE … COMMIT; rolled back on any error.

        Raises StoreUnavailable when SQLite cannot write: locked for `store.busy_timeout_s`, disk full, damaged, ….
        """
        async with self._lock:
            try:
                try:
                    await self._writer.execute("BEGIN IMMEDIATE")
                    yield self._writer
                    await self._writer.commit()
                except BaseException:
                    # A cancelled task must not leave the transaction open for the next one.
                    await asyncio.shield(self._writer.rollback())
                    raise
            except sqlite3.DatabaseError as error:
                _raise_ours(error, "written")

    async def checkpoint(self) -> None:
        """Move what was committed into the file, which gets shorter only then."""
        await asyncio.get_running_loop().run_in_executor(self._thread, _checkpoint, self._there)

    async def empty_log(self) -> None:
        """Cut off the write-ahead log: it holds what was deleted until that is written over.

        While another process reads, or is in the middle of a write, it stays as it is.
        """
        await self.checkpoint()  # what takes long, while others write
        async with self._lock:
            await asyncio.get_running_loop().run_in_executor(self._thread, _empty_log, self._there)

    async def all(self, sql: str, params: dict[str, object] | None = None) -> list[sqlite3.Row]:
        try:
            return list(await self._reader.execute_fetchall(sql, params or {}))
        except sqlite3.DatabaseError as error:
            _raise_ours(error, "read")

    async def one(self, sql: str, params: dict[str, object] | None = None) -> sqlite3.Row | None:
        rows = await self.all(sql, params)
        return rows[0] if rows else None


@asynccontextmanager
async def opened(config: StoreConfig) -> AsyncIterator[Database]:
    """The store of a configuration, closed in the end."""
    database = await Database.open(config)
    try:
        yield database
    finally:
        await database.close()


async def _connect(path: Path, config: StoreConfig) -> aiosqlite.Connection:
    connection = await aiosqlite.connect(path, timeout=config.busy_timeout_s, isolation_level=None)
    try:
        # SQLite does not wait for another process that is just making the same new file a WAL one.
        async for attempt in AsyncRetrying(
            stop=stop_after_delay(config.busy_timeout_s),
            wait=wait_random(0.01, 0.05),
            retry=retry_if_exception(_is_locked),
            reraise=True,
        ):
            with attempt:
                await _set_up(connection, config)
    except BaseException:
        await connection.close()  # or its thread keeps the process alive
        raise
    return connection


async def _set_up(connection: aiosqlite.Connection, config: StoreConfig) -> None:
    connection.row_factory = sqlite3.Row
    pages = await (await connection.execute("PRAGMA page_count")).fetchone()
    if pages is not None and pages[0] == 0:  # a new file; of any other, this would be a write
        await connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    for pragma in _pragmas(config):
        await connection.execute(pragma)


def _connect_here(path: Path, config: StoreConfig, *, wait: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=config.busy_timeout_s, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    for pragma in (*_pragmas(config), "PRAGMA wal_autocheckpoint = 0"):
        connection.execute(pragma)
    if not wait:  # from now on
        connection.execute("PRAGMA busy_timeout = 0")
    return connection


def _pragmas(config: StoreConfig) -> list[str]:
    return [
        "PRAGMA journal_mode = WAL",
        f"PRAGMA journal_size_limit = {LONG_LOG}",
        f"PRAGMA synchronous = {config.synchronous.upper()}",
        "PRAGMA foreign_keys = ON",
        "PRAGMA secure_delete = ON",  # what is deleted is overwritten; with many builds of SQLite it is so anyway
        "PRAGMA temp_store = MEMORY",
        "PRAGMA mmap_size = 268435456",
    ]


def _try_commit(connection: sqlite3.Connection, runs: Runs) -> bool:
    """Whether it could be done at once; False if another process is writing."""
    try:
        _commit(connection, runs)
    except sqlite3.OperationalError as error:
        if _is_locked(error):
            return False
        raise
    return True


def _is_locked(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def _checkpoint(connection: sqlite3.Connection) -> None:
    """Move what was committed from the write-ahead log into the file, as far as nobody has to wait for it."""
    with suppress(sqlite3.DatabaseError):
        _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        if pages * page_size > LONG_LOG:
            _begin_log_anew(connection)


def _begin_log_anew(connection: sqlite3.Connection) -> None:
    """While there are new records all the time, the log never does so by itself; nobody waits long for it.

    The file stays as long as `journal_size_limit` says: cutting it off, to let it grow again, cost a tenth of a large
    call.
    """
    _checkpoint_alone(connection, "RESTART")


def _empty_log(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.DatabaseError):
        _checkpoint_alone(connection, "TRUNCATE")


def _checkpoint_alone(connection: sqlite3.Connection, mode: str) -> None:
    (timeout,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout = 50")
    try:
        connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {timeout}")


def _commit(connection: sqlite3.Connection, runs: Runs) -> None:
    def work(connection: sqlite3.Connection) -> None:
        for statement, rows in runs:
            connection.executemany(statement, rows)

    _in_transaction(connection, work)


def _in_transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    try:
        connection.execute("BEGIN IMMEDIATE")
        done = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise
    return done


def _raise_ours(error: sqlite3.DatabaseError, what: str) -> NoReturn:
    """StoreUnavailable for what the file, its disk or another process is to blame for; other errors as they are."""
    if type(error) not in (sqlite3.OperationalError, sqlite3.DatabaseError):  # the latter: the file is damaged
        raise error
    nothing = "; nothing was recorded, try again" if what == "written" else ""
    raise StoreUnavailable(f"the store cannot be {what}: {error}{nothing}") from error


async def _migrate(connection: aiosqlite.Connection) -> None:
    """Run the numbered scripts of `migrations/` that this file has not seen; NotSupportedError for one that saw more.

    In one transaction: several processes may start at once.
    """
    files = resources.files("lightning_proxy.proxy.store").joinpath("migrations").iterdir()
    scripts = {int(match[1]): file for file in files if (match := re.match(r"(\d{4})_.*\.sql", file.name))}
    await connection.execute("BEGIN IMMEDIATE")
    row = await (await connection.execute("PRAGMA user_version")).fetchone()
    version = row[0] if row else 0
    if version > max(scripts):
        raise sqlite3.NotSupportedError("a newer lightning-proxy has worked on it; update this one, or set store.url")
    for number in sorted(scripts):
        if number > version:
            for statement in _statements(scripts[number].read_text()):
                await connection.execute(statement)
            await connection.execute(f"PRAGMA user_version = {number}")
    await connection.commit()


def _statements(script: str) -> Iterator[str]:
    """Split an SQL script; `executescript` would commit the transaction around it."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
