"""The server's lock that lets one of several processes do a job. It belongs to a connection, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar

import asyncpg

from ...core.config.server import StoreConfig
from ...core.errors import StoreUnavailable
from .errors import raise_ours

TAKE = "SELECT pg_try_advisory_lock(hashtextextended(current_schema() || ':' || $1, 0))"
# A way that is cut says nothing. The server takes 25 s to notice, and only then gives the lock to another.
BEAT_S = 5.0
LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)

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
            taken = bool(await connection.fetchval(TAKE, work, timeout=config.busy_timeout_s))
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
