"""A database of a PostgreSQL server. Several proxies and a trainer may work on it at once, on several machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import NoReturn, TypeVar
from weakref import WeakSet

import asyncpg
import orjson

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ..calls import CALL_END, CALL_START
from ..database import (
    HURRIED,
    LOOK_S,
    SMALL,
    Changes,
    ConstraintRefused,
    Database,
    Params,
    Runs,
    Topic,
    Transaction,
    Work,
    Writing,
)
from ..schema import NUMBERS, missing_parts, parts, require_all
from .statements import HOLD_ROLLOUTS, PostgresTransaction, in_order, rollouts_to_hold

T = TypeVar("T")

CONNECTIONS = 10  # of one process, at most
READING = 4  # of them, for long queries
ALONE = 3  # of them, for those that wait for the store's write lock
COMMAND_S = 120.0  # that work may take which nobody waits for; a server that is gone does not say so
FROZEN_S = 1.0  # that a statement on a call's way may take once the server did not answer in time, until it does
BYTES_A_SECOND = 10_000_000  # that a server takes at least
# A session whose process is gone must not keep its locks for hours. By its own cost of a page, that of a rotating disk,
# the server would read tables as a whole for a few thousand rows of an index.
SESSION = {
    "idle_in_transaction_session_timeout": "30s", "tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3", "jit": "off", "random_page_cost": "1.1",
}  # fmt: skip
AGAIN_S = 0.05  # until the next attempt

BEGIN = "BEGIN"
# Whoever reads before it writes has the store to itself, but for the recorders: they only add, and end what they added.
BEGIN_ALONE = "BEGIN; SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || ':write', 0))"
FOLD_COUNTS = """
WITH changes AS (DELETE FROM rollout_count_changes RETURNING *)
INSERT INTO rollout_count_changes SELECT mode, status, SUM(rollouts) FROM changes GROUP BY mode, status
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
# The server, its disk or what we may do there is to blame; waiting does not help.
UNUSABLE = (
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresSystemError,
    asyncpg.PostgresIOError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.UndefinedTableError,
    asyncpg.LockNotAvailableError,
)
# Two transactions got in each other's way, and this one was undone.
AGAIN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)

TAKE_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(current_schema() || ':' || $1, 0))"
# A way that is cut says nothing. The server takes 25 s to notice, and only then gives the lock to another.
BEAT_S = 5.0
LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)

CHANNEL = "lightning_store"
# Triggers of `postgres.sql` tell of what is seldom written. The server commits transactions that tell something one
# after the other, so recorders do it after their commits.
NOTIFY = f"SELECT pg_notify('{CHANNEL}', current_schema() || '.calls')"
NOTIFY_EVERY_S = 0.1  # at most
LISTEN_AGAIN_S = 1.0  # until the next attempt to listen


class PostgresDatabase(Database):
    """A pool of connections. A server that is away for less than `store.busy_timeout_s` is waited for."""

    def __init__(self, config: StoreConfig, pool: asyncpg.Pool) -> None:
        self.where = config.where
        self._config = config
        self._pool = pool
        self._writes = Writing()
        self._listener = Listener(config, SESSION)
        self._under_way: set[asyncio.Task[object]] = set()
        self._frozen = False  # it did not answer in time, and has not answered since
        self._reading, self._alone = asyncio.Semaphore(READING), asyncio.Semaphore(ALONE)

    @classmethod
    async def open_to_write(cls, config: StoreConfig) -> PostgresDatabase:
        """Connect, making the tables as needed. Raise StoreUnavailable when that cannot be done."""
        return await cls._open(config, to_write=True)

    @classmethod
    async def open_as_it_is(cls, config: StoreConfig) -> PostgresDatabase:
        """Connect to read. Raise StoreUnavailable also where tables are missing."""
        return await cls._open(config, to_write=False)

    @classmethod
    async def _open(cls, config: StoreConfig, *, to_write: bool) -> PostgresDatabase:
        settings = SESSION | {"application_name": "lightning-proxy"}
        settings["lock_timeout"] = f"{config.busy_timeout_s:g}s"
        settings |= {} if to_write else {"default_transaction_read_only": "on"}
        try:
            pool = await asyncpg.create_pool(
                config.url, min_size=1, max_size=CONNECTIONS, reset=_keep_as_it_is,
                timeout=config.busy_timeout_s, command_timeout=COMMAND_S, server_settings=settings,
            )  # fmt: skip
        except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise _not_opened(config, error) from error
        try:
            async with pool.acquire() as connection:
                if to_write:
                    await make_tables(connection, config.where)
                else:
                    require_all(config.where, await missing_in(connection, config.where))
        except BaseException as error:
            await pool.close()
            if isinstance(error, OSError | asyncpg.PostgresError | asyncpg.InterfaceError):
                raise _not_opened(config, error) from error
            raise
        return cls(config, pool)

    async def close(self) -> None:
        while self._under_way:
            await asyncio.wait(self._under_way)
        await self._listener.close()
        await self._pool.close()

    # Writes --------------------------------------------------------------------------------------------------------

    async def commit(self, runs: Runs, size: int = SMALL) -> None:
        """Commit within `store.busy_timeout_s` plus the time for so many bytes: calls wait for it."""

        async def work(db: Transaction) -> None:
            if hold := rollouts_to_hold(runs):
                await db.all(HOLD_ROLLOUTS, {"ids": orjson.dumps(hold).decode()})
            for statement, rows in runs:
                await db.many(statement, in_order(statement, rows))

        try:
            try:
                await self._to_the_end(work, BEGIN, self._patience(hurried=True) + size / BYTES_A_SECOND)
            except OutcomeUnknown:
                if not await self._is_recorded(runs):
                    raise
        except StoreUnavailable as error:
            self._writes.failed(error.message)
            raise
        self._writes.succeeded()

    async def _is_recorded(self, runs: Runs) -> bool:
        """Whether a call of a commit is in the store, and with it all of the commit. Raise StoreUnavailable."""
        for statement, rows in runs:
            if (recorded := RECORDED.get(statement)) is not None:
                return await self.quick(recorded, rows[0]) is not None
        return False

    async def write(self, work: Work[T], size: int = SMALL) -> T:
        try:
            seconds = self._patience(HURRIED.get())
            async with _one_of(self._alone, seconds):
                return await self._to_the_end(work, BEGIN_ALONE, seconds + size / BYTES_A_SECOND)
        except StoreUnavailable as error:
            self._writes.failed(error.message)
            raise

    async def require_writable(self) -> None:
        await self.write(lambda db: db.all("SELECT pg_current_xact_id()::TEXT AS id"))
        self._writes.require()

    def _patience(self, hurried: bool) -> float:
        """How many seconds the server has to answer."""
        if not hurried:
            return COMMAND_S
        return min(FROZEN_S, self._config.busy_timeout_s) if self._frozen else self._config.busy_timeout_s

    async def _to_the_end(self, work: Work[T], begin: str, seconds: float) -> T:
        """Shielded: a transaction that has begun ends, also when its caller is cancelled."""
        task = asyncio.ensure_future(self._transact(work, begin, seconds))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _transact(self, work: Work[T], begin: str, seconds: float) -> T:
        """Do `work` in one transaction; again while the server is away, or if another one got in its way."""
        until = monotonic() + min(seconds, self._config.busy_timeout_s)
        while True:
            committing = False
            try:
                require_held()
                async with self._connection(seconds) as connection:
                    await connection.execute(begin)
                    done = await work(PostgresTransaction(connection))
                    require_held()
                    committing = True
                    await connection.execute("COMMIT")
                    self._listener.recorded()
                    return done
            except Exception as error:
                again = isinstance(error, AGAIN) or (is_away(error) and not committing)
                if not again or monotonic() > until:
                    raise_ours(error, "written", unknown=committing and is_away(error))
            await asyncio.sleep(AGAIN_S)

    @asynccontextmanager
    async def _connection(self, seconds: float) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection, and end it if the block takes longer; undo what the block has not committed."""
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

    async def all(self, sql: str, params: Params | None = None) -> Sequence[asyncpg.Record]:
        seconds = self._patience(HURRIED.get())
        async with _one_of(self._reading, seconds):
            return await self._fetch(sql, params, seconds)

    async def quick(self, sql: str, params: Params | None = None) -> asyncpg.Record | None:
        rows = await self._fetch(sql, params, self._patience(hurried=True))
        return rows[0] if rows else None

    async def _fetch(self, sql: str, params: Params | None, seconds: float) -> Sequence[asyncpg.Record]:
        until = monotonic() + min(seconds, self._config.busy_timeout_s)
        while True:
            try:
                async with self._connection(seconds) as connection:
                    return await PostgresTransaction(connection).all(sql, params)
            except Exception as error:
                if not is_away(error) or monotonic() > until:
                    raise_ours(error, "read")
            await asyncio.sleep(AGAIN_S)

    # The rest ------------------------------------------------------------------------------------------------------

    async def look_for_damage(self) -> None:
        """Do nothing: the server does it by itself."""

    async def checkpoint(self) -> None:
        """Do nothing: the server does it by itself."""

    async def forget_deleted(self) -> None:
        """Do nothing: the server's own log is the server's."""

    async def tidy(self) -> None:
        await self.quick("SELECT feed_newest()")
        await self.write(lambda db: db.run(FOLD_COUNTS))

    def lock(self, work: str) -> AbstractAsyncContextManager[bool]:
        """The lock is that of a connection of its own. When that breaks, the block is cancelled: StoreUnavailable."""
        return locked(self._config, work, SESSION)

    def changes(self, *topics: Topic) -> Changes:
        """Its waiters are woken by NOTIFY. While the connection is broken, they poll."""
        return self._listener.changes(topics)


@asynccontextmanager
async def _one_of(places: asyncio.Semaphore, seconds: float) -> AsyncIterator[None]:
    """Take a place for the block. Raise StoreUnavailable if none gets free."""
    try:
        async with asyncio.timeout(seconds):
            await places.acquire()
    except TimeoutError:
        raise StoreUnavailable(f"the store is busy with longer work: no place within {seconds:g} s") from None
    try:
        yield
    finally:
        places.release()


async def _keep_as_it_is(connection: asyncpg.Connection) -> None:
    """Reset nothing on a connection that is given back: it has no open transaction and no setting."""


def _not_opened(config: StoreConfig, error: BaseException) -> StoreUnavailable:
    message = str(error).partition("\n")[0] or type(error).__name__
    return StoreUnavailable(f"store {config.where} cannot be opened: {message}")


async def missing_in(connection: asyncpg.Connection, where: str) -> list[str]:
    """Return the features whose tables are missing. Raise OtherSchema if the database is none of this schema."""
    tables = {row[0] for row in await connection.fetch(TABLES)}
    rows = await connection.fetch(NUMBERS) if "schema_numbers" in tables else []
    return missing_parts(where, tables, {row["room"]: row["number"] for row in rows})


async def make_tables(connection: asyncpg.Connection, where: str) -> None:
    """Make the tables that are missing, in one transaction: several processes may start at once."""
    if not await missing_in(connection, where):
        return
    async with connection.transaction():
        await connection.execute(LOCK_SCHEMA)
        missing = await missing_in(connection, where)
        for part in parts("postgres"):
            if part.name in missing:
                await connection.execute(part.script)


class OutcomeUnknown(StoreUnavailable):
    """The connection broke during a commit: the transaction may have been committed."""


def is_away(error: BaseException) -> bool:
    """Return whether the server is away; what is wrong with a statement's values is another error."""
    return isinstance(error, AWAY) and not isinstance(error, asyncpg.DataError | ValueError)


def raise_ours(error: Exception, what: str, *, unknown: bool = False) -> NoReturn:
    """Raise StoreUnavailable or Refused for an error; others as they are. `unknown`: it came while committing."""
    if isinstance(error, asyncpg.IntegrityConstraintViolationError):
        raise ConstraintRefused(str(error)) from error
    if not is_away(error) and not isinstance(error, (*UNUSABLE, *AGAIN)):
        raise error
    nothing = "; nothing was recorded, try again" if what == "written" else ""
    silent = "the server does not answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    message = str(error).partition("\n")[0] or silent
    if unknown:
        raise OutcomeUnknown(f"the store cannot be {what}: {message}; whether it was recorded is not known") from error
    raise StoreUnavailable(f"the store cannot be {what}: {message}{nothing}") from error


_held: ContextVar[Lock | None] = ContextVar("held", default=None)


class Lock:
    """A lock that this process holds until it is `lost`."""

    def __init__(self, work: str) -> None:
        self._work = work
        self.lost = False

    def error(self) -> StoreUnavailable:
        """Return the error that ends a job whose lock was lost."""
        return StoreUnavailable(
            f"the connection to the store broke, and with it the lock of the {self._work}: another process may have it"
        )


def require_held() -> None:
    """Raise StoreUnavailable if this job needs a lock, and it is lost."""
    if (lock := _held.get()) is not None and lock.lost:
        raise lock.error()


@asynccontextmanager
async def locked(config: StoreConfig, work: str, session: Mapping[str, str]) -> AsyncIterator[bool]:
    """Yield whether the lock of a job is ours now. If it is lost, the block is cancelled.

    Raises StoreUnavailable when the server cannot be reached, and after the lock was lost.
    """
    try:
        connection = await asyncpg.connect(config.url, timeout=config.busy_timeout_s, server_settings=dict(session))
    except Exception as error:
        raise_ours(error, "reached")
    try:
        try:
            taken = bool(await connection.fetchval(TAKE_LOCK, work, timeout=config.busy_timeout_s))
        except Exception as error:
            raise_ours(error, "reached")
        if not taken:
            yield False
            return
        async with _until_lost(connection, Lock(work)):
            yield True
    finally:
        with suppress(*LOST):
            await asyncio.shield(connection.close(timeout=config.busy_timeout_s))


@asynccontextmanager
async def _until_lost(connection: asyncpg.Connection, lock: Lock) -> AsyncIterator[None]:
    """Cancel the block when the connection ends, and raise StoreUnavailable in place of the cancellation."""

    def lose(_: object) -> None:
        lock.lost = True
        with suppress(RuntimeError):  # the block has just ended
            running.reschedule(0)  # at once

    held = _held.set(lock)
    beating = asyncio.create_task(_beat(connection))
    try:
        async with asyncio.timeout(None) as running:
            connection.add_termination_listener(lose)
            try:
                yield
            finally:
                connection.remove_termination_listener(lose)
        if lock.lost:  # after its last wait
            raise lock.error()
    except TimeoutError:
        if not lock.lost:
            raise
        raise lock.error() from None
    finally:
        beating.cancel()
        _held.reset(held)


async def _beat(connection: asyncpg.Connection) -> None:
    """Ask the server now and then whether it is there; end the connection if it does not answer."""
    try:
        while True:
            await asyncio.sleep(BEAT_S)
            await connection.execute("SELECT 1", timeout=BEAT_S)
    except LOST:
        connection.terminate()


class Listener:
    """The connection on which a process listens. It is made when somebody waits for the first time."""

    def __init__(self, config: StoreConfig, session: Mapping[str, str]) -> None:
        self._config, self._session = config, dict(session)
        self._waiting: WeakSet[Heard] = WeakSet()
        self._recorded = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self.hears = False

    def changes(self, topics: Iterable[Topic]) -> Heard:
        """Return a `Changes` that waits for these topics."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        self._waiting.add(heard := Heard(self, topics))
        return heard

    def recorded(self) -> None:
        """Notify all processes, this one too, that something was recorded."""
        self._recorded.set()

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            with suppress(*LOST):
                async with self._connection() as connection:
                    self.hears = True
                    self._wake()  # what was written before it listened
                    await self._notify(connection)
            self.hears = False
            self._wake()
            await asyncio.sleep(LISTEN_AGAIN_S)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[asyncpg.Connection]:
        """A connection that listens."""
        timeout = self._config.busy_timeout_s
        connection = await asyncpg.connect(self._config.url, timeout=timeout, server_settings=self._session)
        try:
            schema = await connection.fetchval("SELECT current_schema()", timeout=timeout)

            def hear(_: object, __: int, ___: str, payload: object) -> None:
                where, _, topic = str(payload).rpartition(".")
                if where == schema:
                    self._wake(topic)

            connection.add_termination_listener(lambda _: self._recorded.set())
            async with asyncio.timeout(timeout):
                await connection.add_listener(CHANNEL, hear)
            yield connection
        finally:
            with suppress(*LOST):
                await asyncio.shield(connection.close(timeout=timeout))

    async def _notify(self, connection: asyncpg.Connection) -> None:
        """Send notifications of records, and probe the server now and then, until it is gone."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._recorded.wait()
            statement = NOTIFY if self._recorded.is_set() else "SELECT 1"
            self._recorded.clear()
            await connection.execute(statement, timeout=BEAT_S)
            await asyncio.sleep(NOTIFY_EVERY_S)

    def _wake(self, topic: str | None = None) -> None:
        """Wake those that wait for a topic; all of them without one."""
        for heard in self._waiting:
            if topic is None or topic in heard.topics:
                heard.event.set()


class Heard(Changes):
    """Waits for a listener's notifications."""

    def __init__(self, listener: Listener, topics: Iterable[Topic]) -> None:
        self.topics = frozenset[str](topics)
        self.event = asyncio.Event()
        self._listener = listener
        self._returned = monotonic()

    @property
    def hears(self) -> bool:
        """Return whether it is notified of changes now."""
        return self._listener.hears

    async def wait(self, seconds: float, longest: float = LOOK_S) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, longest) if self.hears else seconds):
                await self.event.wait()
                await asyncio.sleep(self._returned + seconds - monotonic())
        self.event.clear()
        self._returned = monotonic()
