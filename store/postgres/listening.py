"""Listens by NOTIFY for writes of any process. While the connection is broken, waiters poll."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from time import monotonic
from weakref import WeakSet

import asyncpg

from ...core.config.server import StoreConfig
from ..database import LOOK_S, Changes, Topic
from .alone import BEAT_S, LOST

CHANNEL = "lightning_store"
# Triggers of `postgres.sql` tell of what is seldom written. The server commits transactions that tell something one
# after the other, so recorders do it after their commits.
TELL = f"SELECT pg_notify('{CHANNEL}', current_schema() || '.calls')"
TELL_EVERY_S = 0.1  # at most
AGAIN_S = 1.0  # until the next attempt to listen


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
            await asyncio.sleep(AGAIN_S)

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
