"""Reads a request's headers and body, and sends its reply, at the level of ASGI: nothing is added or rewritten.

Each body is read in limited size and time, and all that are being read take limited memory together.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import orjson

from ..config.server import ProxyConfig
from ..errors import InvalidRequest, LightningError, Overloaded, RequestTimeout, TooLarge
from ..types import Header

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

WATCH_AFTER_S = 0.02  # most answers are there by then; a task to watch for the agent's leaving costs more than they do


class ClientDisconnected(Exception):
    """The client left before its request was complete."""


# Where a header decides something, two of them would be one for us and perhaps the other for somebody else.
_ONCE = frozenset(
    b"host authorization x-api-key api-key x-rollout-id x-task-id x-agent-name x-rollout-mode x-recording"
    b" idempotency-key transfer-encoding".split()
)


def read_headers(scope: Scope) -> dict[str, str]:
    """Return a request's headers by their lower-case names.

    Raises InvalidRequest for two of a kind that may be there only once, and for a body in an encoding that we, or a
    client of HTTP/1.0, do not know.
    """
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if len(headers) < len(scope["headers"]):
        for name, n in Counter(name for name, _ in scope["headers"]).items():
            if n > 1 and name in _ONCE:
                raise InvalidRequest(f"the header {name.decode()} is there {n} times", param=name.decode())
        packed = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"]
        if len(packed) > 1:
            headers["content-encoding"] = ", ".join(packed)
    encoding = headers.get("transfer-encoding")
    if encoding is not None and (encoding.lower() != "chunked" or scope["http_version"] == "1.0"):
        raise InvalidRequest("Transfer-Encoding must be chunked, in HTTP/1.1")
    return headers


class Reply:
    """The reply to one request, as it is sent to the agent."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        error_body: Callable[[LightningError], dict[str, Any]] = LightningError.body,
    ) -> None:
        self.started = False
        self.agent_left = False
        self._receive = receive
        self._send = send
        self._error_body = error_body

    async def start(self, status: int, headers: list[Header]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, more: bool = True) -> None:
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send(self, status: int, headers: list[Header], body: bytes) -> None:
        if status != 204:  # RFC 9110, section 8.6
            headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self.start(status, headers)
        await self.body(body, more=False)

    async def json(self, status: int, body: Any, headers: Iterable[Header] = ()) -> None:
        await self.send(status, [(b"content-type", b"application/json"), *headers], orjson.dumps(body))

    async def error(self, error: LightningError, headers: Iterable[Header] = ()) -> None:
        await self.json(error.status, self._error_body(error), (*error.headers, *headers))

    @contextmanager
    def while_connected(self, *, finish_s: float = 0.0) -> Iterator[None]:
        """Run the block once the request is read; it is cancelled so many seconds after the agent has disconnected.

        `agent_left` is set at once.
        """
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert this is not None
        cancelled = False
        watch: asyncio.Task[None] | None = None

        async def wait_for_the_end() -> None:
            nonlocal cancelled
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.agent_left = True
            await asyncio.sleep(finish_s)
            cancelled = this.cancel()

        def begin() -> None:
            nonlocal watch
            watch = loop.create_task(wait_for_the_end())

        later = loop.call_later(WATCH_AFTER_S, begin)
        try:
            yield
        except asyncio.CancelledError:
            if not cancelled or this.uncancel() > 0:
                raise
        finally:
            later.cancel()
            if watch is not None:
                watch.cancel()


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
            raise RequestTimeout(
                f"the request's body did not arrive within {self._seconds:g} s (proxy.body_timeout_s)"
            ) from None
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


WAIT_S = 5.0


class Memory:
    """Lends a limited number of bytes, first come first served: a large body is not overtaken for ever."""

    def __init__(self, size: int, wait_s: float | None = None) -> None:
        self._size = size
        self._free = size
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> int:
        """Lend `size` bytes, or all there are, and return how many. Raise Overloaded after a wait."""
        size = min(size, self._size)
        if size <= self._free and not self._queue:
            self._free -= size
            return size
        turn = (size, asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn[1]
        except BaseException as error:
            self._leave(turn)
            if isinstance(error, TimeoutError):
                raise Overloaded("too many large requests at once; try again in a moment") from None
            raise
        return size

    def give_back(self, size: int) -> None:
        self._free += size
        while self._queue and self._queue[0][0] <= self._free:
            size, turn = self._queue.popleft()
            if not turn.done():  # it is, if the waiting task was cancelled just now
                self._free -= size
                turn.set_result(None)

    def _leave(self, turn: tuple[int, asyncio.Future[None]]) -> None:
        """Give up a turn: one that has come just now gives its bytes back."""
        size, come = turn
        has_come = come.done() and not come.cancelled()
        if turn in self._queue:
            self._queue.remove(turn)
        self.give_back(size if has_come else 0)
