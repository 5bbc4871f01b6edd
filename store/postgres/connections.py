"""Connections of their own to a PostgreSQL server: one holds a lock, one listens. And what errors of any mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import NoReturn
from weakref import WeakSet

import asyncpg

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from ..database import LOOK_S, Changes, ConstraintRefused, Topic

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
TELL = f"SELECT pg_notify('{CHANNEL}', current_schema() || '.calls')"
TELL_EVERY_S = 0.1  # at most
LISTEN_AGAIN_S = 1.0  # until the next attempt to listen


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
                    await self._tell(connection)
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

    async def _tell(self, connection: asyncpg.Connection) -> None:
        """Send notifications of records, and probe the server now and then, until it is gone."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._recorded.wait()
            statement = TELL if self._recorded.is_set() else "SELECT 1"
            self._recorded.clear()
            await connection.execute(statement, timeout=BEAT_S)
            await asyncio.sleep(TELL_EVERY_S)

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
