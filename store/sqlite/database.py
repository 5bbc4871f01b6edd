"""A store in one SQLite file, written in transactions that are committed completely or not at all."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn, TypeVar

import aiosqlite
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ..database import SMALL, ConstraintRefused, Database, Params, Runs, Transaction, Work, Writing, unavailable
from .file import connect_to_read, lock_file, make_private, make_tables, missing_in, only_read

log = logging.getLogger(__name__)

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]

CHECKPOINT_EVERY = 200  # commits
LARGE = 2**18  # bytes, from which on a commit is done in the writer's thread
LONG_LOG = 2**26  # bytes of write-ahead log, from which on everybody waits for a moment so that it starts over
# Of the file, its disk or another process; the second: the file is damaged. Others are of what was to be written.
FAULTS = (sqlite3.OperationalError, sqlite3.DatabaseError)
ROOM = 2**20  # bytes that a disk has to have for more records
CHECKPOINT_S = 0.05  # that a checkpoint waits for others


class SqliteDatabase(Database):
    """Uses three connections: one in the event loop's thread, and one each in a writer's and a reader's thread.

    Statements that every call needs run in the event loop (`commit`, `quick`), which is faster than in a thread. So as
    not to block the loop, a commit that is large or synced, or finds the store locked, goes to the writer's thread, as
    all other transactions do. Readers never wait for writers.
    """

    def __init__(self, path: Path, config: StoreConfig, connections: Sequence[sqlite3.Connection]) -> None:
        self.path, self.where = path, str(path)
        self._config = config
        self._here, self._writer, reader = connections
        self._thread = ThreadPoolExecutor(1)  # the writer's
        self._reader = aiosqlite.Connection(lambda: reader, iter_chunk_size=64)
        self._reader._thread.daemon = True  # it holds up no process that ends without closing it
        self._files = {file: _identity(file) for file in (path, Path(f"{path}-wal"))}
        self._of_turn: dict[str, sqlite3.Row | None] = {}  # what `quick` read in this turn of the event loop
        self._writes = Writing()
        self._commits = self._written = 0  # since the last checkpoint; bytes, about
        self._checkpoint: asyncio.Task[None] | None = None  # that a commit began
        self._checkpointing = asyncio.Lock()  # SQLite turns a second one away without waiting

    @classmethod
    async def open(cls, config: StoreConfig, *, to_write: bool) -> SqliteDatabase:
        path = config.path.expanduser().absolute()
        # A proxy has worked on it; its lock is still next to it.
        emptied = to_write and Path(f"{path}-keeper").exists() and path.exists() and path.stat().st_size == 0
        try:
            database = cls(path, config, await asyncio.to_thread(_connect_all, path, config, to_write))
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailable(f"store {path} cannot be opened: {error}") from error
        await database._reader
        if emptied:
            database._damaged("it had 0 bytes when it was opened, so all that was recorded before is gone")
        return database

    async def close(self) -> None:
        if self._checkpoint is not None:
            await asyncio.wait([self._checkpoint])
        await asyncio.shield(asyncio.gather(asyncio.to_thread(self._thread.shutdown), self._reader.close()))
        for connection in (self._writer, self._here):
            connection.close()

    # Writes --------------------------------------------------------------------------------------------------------

    async def commit(self, runs: Runs, size: int = SMALL) -> None:
        """Raises StoreUnavailable if the file stays locked, if it was damaged or replaced, or if the disk is full."""

        def work(connection: sqlite3.Connection) -> None:
            for statement, rows in runs:
                connection.executemany(statement, rows)

        self._of_turn.clear()
        here = size <= LARGE and self._config.synchronous != "full"
        try:
            if here:
                _in_transaction(work, self._here)
        except sqlite3.DatabaseError as error:
            if not _is_locked(error):
                self._failed(error)
            here = False
        if not here:
            await self._in_thread(partial(_in_transaction, work))
        self._committed(size)
        self._writes.succeeded()

    async def write(self, work: Work[T], size: int = SMALL) -> T:
        job: Job[T] = partial(_in_transaction, lambda connection: finish(work(SqliteTransaction(connection))))
        done = await self._in_thread(job)
        self._committed(size)
        return done

    async def _in_thread(self, job: Job[T]) -> T:
        """Run a job in the writer's thread. It is completed even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.shield(loop.run_in_executor(self._thread, job, self._writer))
        except sqlite3.DatabaseError as error:
            self._failed(error)

    def _failed(self, error: sqlite3.DatabaseError, what: str = "written") -> NoReturn:
        """Raise ConstraintRefused for a refused row, StoreUnavailable if the store failed, or else `error` itself."""
        if isinstance(error, sqlite3.IntegrityError):
            raise ConstraintRefused(str(error)) from error
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            self._damaged(str(error))
        if type(error) not in FAULTS:
            raise error
        if what == "written":
            self._writes.failed(str(error))
        raise unavailable(what, error) from error

    def _damaged(self, how: str) -> None:
        if self.damage is None:
            self.damage = f"damaged: {how}; restore it from a backup (`store restore`)"
            log.error("the store %s is %s", self.path, self.damage, extra={"once": True})

    async def look_for_damage(self) -> None:
        def check() -> str:
            with closing(only_read(self.path)) as connection:
                return str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])

        try:
            found = await asyncio.to_thread(check)
        except sqlite3.OperationalError:  # busy; it says nothing of the file
            return
        except sqlite3.DatabaseError as error:
            found = str(error)
        if found != "ok":
            self._damaged(" ".join(found.split()))

    async def require_writable(self) -> None:
        self._require_place()
        await self._in_thread(partial(_in_transaction, _write_the_same))
        # That is a page, which may fit where a record does not.
        self._writes.require(self._writes.why is None or await asyncio.to_thread(has_room, self.path.parent))

    def _require_place(self) -> None:
        """Raise StoreUnavailable if the file or its log was removed or replaced, or if the file was emptied."""
        for file, known in self._files.items():
            if _identity(file) != known:
                way = "put it back, or restore it from a backup, and restart the proxy and the trainer"
                self._writes.failed(problem := f"the file {file} was removed or replaced, or it has 0 bytes: {way}")
                raise StoreUnavailable(problem)

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def _committed(self, size: int) -> None:
        self._require_place()  # before it is acknowledged
        self._commits, self._written = self._commits + 1, self._written + size
        due = self._commits >= CHECKPOINT_EVERY or self._written >= LONG_LOG // 4
        if due and (self._checkpoint is None or self._checkpoint.done()):
            self._commits = self._written = 0
            self._checkpoint = asyncio.create_task(self.checkpoint())

    async def checkpoint(self, *, empty: bool = False) -> None:
        """Move committed pages from the write-ahead log into the file. If `empty`, also truncate the log."""
        async with self._checkpointing:
            await asyncio.to_thread(_checkpoint, self.path, self._config, empty)

    async def forget_deleted(self) -> None:
        """Truncate the write-ahead log, which holds deleted rows until they are overwritten.

        While another process reads or writes, the log cannot be truncated.
        """
        await self.checkpoint(empty=True)

    # Reads ---------------------------------------------------------------------------------------------------------

    async def all(self, sql: str, params: Params | None = None) -> list[sqlite3.Row]:
        try:
            return list(await self._reader.execute_fetchall(sql, params or {}))
        except sqlite3.DatabaseError as error:
            self._failed(error, "read")

    async def quick(self, sql: str, params: Params | None = None) -> sqlite3.Row | None:
        """Return a query's first row, if any. Without `params`, calls in one turn of the event loop share the row."""
        if params is None and sql in self._of_turn:
            return self._of_turn[sql]
        try:
            row: sqlite3.Row | None = self._here.execute(sql, params or {}).fetchone()
        except sqlite3.DatabaseError as error:
            self._failed(error, "read")
        if params is None:
            self._of_turn[sql] = row
            asyncio.get_running_loop().call_soon(self._of_turn.clear)
        return row

    @asynccontextmanager
    async def lock(self, work: str) -> AsyncIterator[bool]:
        with lock_file(self.path, work) as ours:
            yield ours


def has_room(directory: Path) -> bool:
    try:
        with TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM)
    except OSError:
        return False
    return True


def _identity(path: Path) -> tuple[int, ...]:
    """Return a tuple that changes if the file is removed, replaced or, unless it is a log, emptied."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size > 0 or path.name.endswith("-wal")


def _connect_all(path: Path, config: StoreConfig, to_write: bool) -> list[sqlite3.Connection]:
    with ExitStack() as opened:
        if not to_write:
            found = [opened.enter_context(closing(connect_to_read(path, config.busy_timeout_s))) for _ in range(3)]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            found = [opened.enter_context(closing(_connect(path, config))) for _ in range(3)]
            make_tables(found[0], str(path))
            _set_timeout(found[0], 0)  # in the event loop's thread nobody waits
        opened.pop_all()
        return found


def _connect(path: Path, config: StoreConfig, mode: str = "rwc") -> sqlite3.Connection:
    """Open the file in one of SQLite's modes. By default, a missing file is created."""
    if mode == "rwc":
        make_private(path)
    address, wait = f"{path.as_uri()}?mode={mode}", config.busy_timeout_s
    connection = sqlite3.connect(address, wait, isolation_level=None, check_same_thread=False, uri=True)
    connection.row_factory = sqlite3.Row
    # SQLite does not wait for another process that is just making the same new file a WAL one.
    patient = Retrying(
        stop=stop_after_delay(wait), wait=wait_random(0.01, 0.05), retry=retry_if_exception(_is_locked), reraise=True
    )
    try:
        patient(missing_in, connection, str(path))  # before anything is written to what is not ours
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:  # a new file; any other would be written to
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for pragma in (
            "journal_mode = WAL",
            f"journal_size_limit = {LONG_LOG}",
            "wal_autocheckpoint = 0",
            f"synchronous = {config.synchronous.upper()}",
            "foreign_keys = ON",
            "secure_delete = ON",  # what is deleted is overwritten; with many builds of SQLite it is so anyway
            "temp_store = MEMORY",
            "mmap_size = 268435456",
        ):
            patient(connection.execute, f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _set_timeout(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")


def _in_transaction(work: Job[T], connection: sqlite3.Connection) -> T:
    try:
        connection.execute("BEGIN IMMEDIATE")
        done = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise
    return done


def _write_the_same(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(f"PRAGMA user_version = {version}")


def _is_locked(error: BaseException) -> bool:
    codes = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in codes


def _checkpoint(path: Path, config: StoreConfig, empty: bool) -> None:
    """Move committed pages from the write-ahead log into the file, without making anybody wait long.

    A separate connection lets the writer continue. Under constant writes a long log never restarts by itself, so it is
    restarted here, after a short wait. Unless `empty`, the log's file keeps up to `journal_size_limit` bytes:
    truncating it, only to let it grow again, took a tenth of a large call's time.
    """
    with suppress(sqlite3.DatabaseError), closing(_connect(path, config, "rw")) as connection:
        _set_timeout(connection, CHECKPOINT_S)
        _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        if empty or pages * page_size > LONG_LOG:
            connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if empty else 'RESTART'})").fetchall()


class SqliteTransaction(Transaction):
    """Runs the statements of one transaction. Its async methods never wait, so no event loop is needed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def all(self, sql: str, params: Params | None = None) -> list[sqlite3.Row]:
        return self._connection.execute(sql, params or {}).fetchall()


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which may await only statements of its transaction."""
    try:
        work.send(None)
    except StopIteration as ended:
        done: T = ended.value
        return done
    work.close()
    raise RuntimeError("a transaction awaited something other than its own statements")
