"""A database on a PostgreSQL server. Several proxies and a trainer, on several machines, may use it at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import NoReturn, TypeVar

import asyncpg

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ...core.json_text import dumps
from ..calls import CALL_END, CALL_START
from ..database import (
    HURRIED,
    SMALL,
    ConstraintRefused,
    Database,
    Params,
    Row,
    Runs,
    Transaction,
    Work,
    Writing,
    unavailable,
)
from ..rollouts import ROLLOUT_SEEN
from ..schema import NUMBERS, missing_parts, parts, require_all
from .statements import PostgresTransaction

T = TypeVar("T")

CONNECTIONS = 10  # of one process, at most
READING = 4  # of them, for long queries
ALONE = 3  # of them, for those that wait for the store's write lock
COMMAND_S = 120.0  # that work may take which nobody waits for; a server that is gone does not say so
FROZEN_S = 1.0  # that a statement on a call's way may take once the server did not answer in time, until it does
BYTES_A_SECOND = 10_000_000  # that a server takes at least
# The session of a process that is gone must not keep its locks for hours. By its own cost of a page, a rotating disk's,
# the server would read tables as a whole for a few thousand rows of an index.
SESSION = {
    "idle_in_transaction_session_timeout": "30s", "tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3", "jit": "off", "random_page_cost": "1.1",
}  # fmt: skip
AGAIN_S = 0.05  # until the next attempt

# Whoever reads before it writes has the store to itself, but for the recorders: they only add, and end what they added.
BEGIN_ALONE = "BEGIN; SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ':write', 0))"
HOLD_ROLLOUTS = """
SELECT 1 FROM rollouts WHERE rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:ids))
ORDER BY rollout_id FOR NO KEY UPDATE
"""
# Whether what a commit does with a call was done. `pg_xact_status` would not do: after a crash the server gives the
# number of a lost transaction to another one.
RECORDED = {
    CALL_START: "SELECT 1 FROM calls WHERE call_id = :call_id",
    CALL_END: "SELECT 1 FROM calls WHERE call_id = :call_id AND status = :status AND latency_ms IS :latency_ms",
}

LOCK_SCHEMA = (
    "SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ':schema', 0))"
)
TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"

# The way to the server is to blame, or it starts, ends or has no place for another connection: soon it may be back.
AWAY = (
    OSError,  # TimeoutError among them
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
)
# A statement or its values are to blame; for others the server, its disk or what we may do there.
OURS = (asyncpg.DataError, asyncpg.PostgresSyntaxError)
# Two transactions got in each other's way, and this one was undone.
AGAIN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)

TAKE_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(current_schema() || ':' || $1, 0))"
# A way that is cut says nothing. The server takes 25 s to notice, and only then gives the lock to another.
BEAT_S = 5.0
LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)


class PostgresDatabase(Database):
    """A pool of connections. If the server is down, requests wait for up to `store.busy_timeout_s`."""

    def __init__(self, config: StoreConfig, pool: asyncpg.Pool) -> None:
        self.where = config.where
        self._config = config
        self._pool = pool
        self._writes = Writing()
        self._under_way: set[asyncio.Task[object]] = set()
        self._frozen = False  # it did not answer in time, and has not answered since
        self._reading, self._alone = asyncio.Semaphore(READING), asyncio.Semaphore(ALONE)

    @classmethod
    async def open(cls, config: StoreConfig, *, to_write: bool) -> PostgresDatabase:
        settings = SESSION | {"application_name": "lightning-proxy", "lock_timeout": f"{config.busy_timeout_s:g}s"}
        settings |= {} if to_write else {"default_transaction_read_only": "on"}
        pool = None
        try:
            pool = await asyncpg.create_pool(
                config.url, min_size=1, max_size=CONNECTIONS, reset=_keep_as_it_is, init=_compress_by_lz4,
                timeout=config.busy_timeout_s, command_timeout=COMMAND_S, server_settings=settings,
            )  # fmt: skip
            async with pool.acquire() as connection:
                if to_write:
                    await make_tables(connection, config.where)
                else:
                    require_all(config.where, await missing_in(connection, config.where))
        except BaseException as error:
            if pool is not None:
                await pool.close()
            if not isinstance(error, (ValueError, *LOST)):
                raise
            message = str(error).partition("\n")[0] or type(error).__name__
            raise StoreUnavailable(f"store {config.where} cannot be opened: {message}") from error
        return cls(config, pool)

    async def close(self) -> None:
        while self._under_way:
            await asyncio.wait(self._under_way)
        await self._pool.close()

    # Writes --------------------------------------------------------------------------------------------------------

    async def commit(self, runs: Runs, size: int = SMALL) -> None:
        """Commit, but wait no longer than `store.busy_timeout_s` plus the time that `size` bytes may take."""

        async def work(db: Transaction) -> None:
            # Every process locks rollouts and digests in the same order.
            ids = sorted({row["rollout_id"] for _, rows in runs for row in rows if "rollout_id" in row})
            if len(ids) > 1:
                await db.all(HOLD_ROLLOUTS, {"ids": dumps(ids)})
            for statement, rows in runs:
                column = "rollout_id" if statement == ROLLOUT_SEEN else "digest"  # others keep their order
                await db.many(statement, sorted(rows, key=lambda row: str(row.get(column, ""))))

        try:
            await self._to_the_end(work, "BEGIN", self._patience(hurried=True) + size / BYTES_A_SECOND)
        except OutcomeUnknown:
            # With one call of a commit, all of the commit is in the store.
            recorded = [(RECORDED[statement], rows[0]) for statement, rows in runs if statement in RECORDED]
            if not recorded or await self.quick(*recorded[0]) is None:
                raise
        self._writes.succeeded()

    async def write(self, work: Work[T], size: int = SMALL) -> T:
        seconds = self._patience(HURRIED.get())
        async with _one_of(self._alone, seconds):
            return await self._to_the_end(work, BEGIN_ALONE, seconds + size / BYTES_A_SECOND)

    async def require_writable(self) -> None:
        await self.write(lambda db: db.all("SELECT pg_current_xact_id()::TEXT AS id"))
        self._writes.require()

    def _patience(self, hurried: bool) -> float:
        """Return how many seconds the server has to answer."""
        if not hurried:
            return COMMAND_S
        return min(FROZEN_S, self._config.busy_timeout_s) if self._frozen else self._config.busy_timeout_s

    async def _to_the_end(self, work: Work[T], begin: str, seconds: float) -> T:
        """Run `work` in a transaction, which is completed even if the caller is cancelled."""
        task = asyncio.ensure_future(self._transact(work, begin, seconds))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.shield(task)
        except StoreUnavailable as error:
            self._writes.failed(error.message)
            raise

    async def _transact(self, work: Work[T], begin: str | None, seconds: float) -> T:
        """Do `work`, in a transaction unless `begin` is None. Retry for a while if the server is down."""
        until = monotonic() + min(seconds, self._config.busy_timeout_s)
        while True:
            committing = False
            try:
                async with self._connection(seconds) as connection:
                    if begin is None:
                        return await work(PostgresTransaction(connection))
                    await connection.execute(begin)
                    done = await work(PostgresTransaction(connection))
                    require_held()
                    committing = True
                    await connection.execute("COMMIT")
                    return done
            except Exception as error:
                again = isinstance(error, AGAIN) or (is_away(error) and not committing)
                if not again or monotonic() > until:
                    raise_ours(error, "read" if begin is None else "written", unknown=committing and is_away(error))
            await asyncio.sleep(AGAIN_S)

    @asynccontextmanager
    async def _connection(self, seconds: float) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection, and close it if the block takes more than `seconds`. A block that fails is rolled back."""
        async with self._pool.acquire(timeout=min(seconds, self._config.busy_timeout_s)) as connection:
            try:
                async with asyncio.timeout(seconds) as limit:
                    yield connection
                self._frozen = False
            except BaseException as error:
                if limit.expired():
                    connection.terminate()  # else whoever gives it back waits until the server has cancelled something
                    self._frozen = True
                    raise TimeoutError(f"the server does not answer within {seconds:g} s") from error
                if connection.is_in_transaction() and not connection.is_closed():
                    try:
                        await connection.execute("ROLLBACK", timeout=self._config.busy_timeout_s)
                    except AWAY:
                        connection.terminate()
                raise

    # Reads ---------------------------------------------------------------------------------------------------------

    async def all(self, sql: str, params: Params | None = None) -> Sequence[Row]:
        seconds = self._patience(HURRIED.get())
        async with _one_of(self._reading, seconds):
            return await self._transact(lambda db: db.all(sql, params), None, seconds)

    async def quick(self, sql: str, params: Params | None = None) -> Row | None:
        return await self._transact(lambda db: db.one(sql, params), None, self._patience(hurried=True))

    @asynccontextmanager
    async def lock(self, work: str) -> AsyncIterator[bool]:
        timeout = self._config.busy_timeout_s
        async with AsyncExitStack() as ending:
            try:
                connection = await asyncpg.connect(self._config.url, timeout=timeout, server_settings=SESSION)
                ending.push_async_callback(_end, connection, timeout)
                taken = await connection.fetchval(TAKE_LOCK, work, timeout=timeout)
            except Exception as error:
                raise_ours(error, "reached")
            if taken:
                await ending.enter_async_context(_until_lost(connection, work))
            yield taken


async def _end(connection: asyncpg.Connection, timeout: float) -> None:
    with suppress(*LOST):
        await asyncio.shield(connection.close(timeout=timeout))


@asynccontextmanager
async def _one_of(places: asyncio.Semaphore, seconds: float) -> AsyncIterator[None]:
    """Hold one of the places during the block. Raises StoreUnavailable if none becomes free in time."""
    try:
        async with asyncio.timeout(seconds):
            await places.acquire()
    except TimeoutError:
        raise StoreUnavailable(f"the store is busy with other work: no connection within {seconds:g} s") from None
    try:
        yield
    finally:
        places.release()


async def _keep_as_it_is(connection: asyncpg.Connection) -> None:
    """Do not reset a returned connection: no work leaves a transaction open or changes its settings."""


async def _compress_by_lz4(connection: asyncpg.Connection) -> None:
    """Let the server compress with LZ4 if it can: that takes a third of the work."""
    with suppress(asyncpg.PostgresError):  # it was built without, or is older than 14
        await connection.execute("SET default_toast_compression = lz4")


async def missing_in(connection: asyncpg.Connection, where: str) -> list[str]:
    """Return the names of `parts` whose tables are missing. Raises OtherSchema if the database has another schema."""
    tables = {row[0] for row in await connection.fetch(TABLES)}
    rows = await connection.fetch(NUMBERS) if "schema_numbers" in tables else []
    return missing_parts(where, tables, {row["room"]: row["number"] for row in rows})


async def make_tables(connection: asyncpg.Connection, where: str) -> None:
    """Make the missing tables. Several processes may do so at once."""
    if not await missing_in(connection, where):
        return
    async with connection.transaction():
        await connection.execute(LOCK_SCHEMA)
        for name in await missing_in(connection, where):
            await connection.execute(parts("postgres")[name][1])


class OutcomeUnknown(StoreUnavailable):
    """The connection broke during a commit, so the transaction may have been committed."""


def is_away(error: BaseException) -> bool:
    """Return whether the error means that the server cannot serve us now, rather than that values are wrong."""
    return isinstance(error, AWAY) and not isinstance(error, asyncpg.DataError | ValueError)


def raise_ours(error: Exception, what: str, *, unknown: bool = False) -> NoReturn:
    """Raise StoreUnavailable for a fault of the server, ConstraintRefused for a refused row, or else `error` itself.

    `unknown`: the commit may have succeeded.
    """
    if isinstance(error, asyncpg.IntegrityConstraintViolationError):
        raise ConstraintRefused(str(error)) from error
    if not is_away(error) and (not isinstance(error, asyncpg.PostgresError) or isinstance(error, OURS)):
        raise error
    silent = "the server does not answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    message = str(error).partition("\n")[0] or silent
    if unknown:
        raise OutcomeUnknown(f"the store cannot be {what}: {message}; the data may or may not be recorded") from error
    raise unavailable(what, message) from error


_held: ContextVar[tuple[str, asyncpg.Connection] | None] = ContextVar("held", default=None)


def require_held() -> None:
    """Raise StoreUnavailable if this job needs a lock that has been lost."""
    if (held := _held.get()) is not None and held[1].is_closed():
        raise StoreUnavailable(
            f"the connection to the store broke, so the {held[0]} lock was lost: another process may have it"
        )


@asynccontextmanager
async def _until_lost(connection: asyncpg.Connection, work: str) -> AsyncIterator[None]:
    """If the connection ends during the block, cancel the block and raise StoreUnavailable."""

    def lose(_: object) -> None:
        with suppress(RuntimeError):  # the block has just ended
            running.reschedule(0)  # at once

    held = _held.set((work, connection))
    beating = asyncio.create_task(_beat(connection))
    try:
        async with asyncio.timeout(None) as running:
            connection.add_termination_listener(lose)
            yield
        require_held()
    except TimeoutError:
        require_held()
        raise
    finally:
        connection.remove_termination_listener(lose)
        beating.cancel()
        _held.reset(held)


async def _beat(connection: asyncpg.Connection) -> None:
    """Check regularly that the server answers; close the connection if it does not."""
    try:
        while True:
            await asyncio.sleep(BEAT_S)
            await connection.execute("SELECT 1", timeout=BEAT_S)
    except LOST:
        connection.terminate()
