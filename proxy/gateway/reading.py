"""Reads request bodies: each in limited size and time, and all that are being read in limited memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ..access.memory import Memory
from ..config.server import ProxyConfig
from ..errors import RequestTimeout, TooLarge
from .asgi import ClientDisconnected, Receive

LATE_EVERY_S = 1.0  # how often late bodies are looked for, at most


class Bodies:
    """Reads the bodies of a process's requests. What arrives with its head, as most does, takes nothing of `Memory`.

    One look at all bodies, now and then, finds those that are late: a timer for each would cost a call of 1 KB more
    than all else that is done here.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self.limit = int(config.max_body_mb * 1_000_000)
        self._memory = Memory(max(int(config.max_bodies_mb * 1_000_000), self.limit))
        self._seconds = config.body_timeout_s
        self._since: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        """Return a request's body.

        Raises TooLarge, RequestTimeout, Overloaded if too many are being read, and ClientDisconnected.
        """
        task = asyncio.current_task()
        assert task is not None
        self._since[task] = asyncio.get_running_loop().time()
        try:
            return await self._read(receive, headers)
        except asyncio.CancelledError:
            if task not in self._late or task.uncancel() > 0:
                raise
            raise RequestTimeout(f"no whole body within {self._seconds:g} s (proxy.body_timeout_s)") from None
        finally:
            del self._since[task]
            self._late.discard(task)

    async def watch(self) -> None:
        """End the reading of late bodies until cancelled."""
        while True:
            await asyncio.sleep(min(LATE_EVERY_S, self._seconds / 4))
            now = asyncio.get_running_loop().time()
            for task, since in self._since.items():
                if since + self._seconds < now and task not in self._late:
                    self._late.add(task)
                    task.cancel()

    async def _read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        length = headers.get("content-length", "")
        declared = int(length) if length.isdecimal() else None
        if declared is not None and declared > self.limit:
            raise self._too_large()
        first, more = await _piece(receive)
        if not more:
            if len(first) > self.limit:
                raise self._too_large()
            return first
        lent = await self._memory.take(self.limit if declared is None else declared)
        try:
            return await self._rest(receive, bytearray(first))
        finally:
            self._memory.give_back(lent)

    async def _rest(self, receive: Receive, body: bytearray) -> bytes:
        more = True
        while more:
            if len(body) > self.limit:
                raise self._too_large()
            piece, more = await _piece(receive)
            body += piece
        if len(body) > self.limit:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the request body is larger than {self.limit} bytes (proxy.max_body_mb)")


async def _piece(receive: Receive) -> tuple[bytes, bool]:
    """The next piece of a body, and whether more comes."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return bytes(message.get("body", b"")), bool(message.get("more_body"))
