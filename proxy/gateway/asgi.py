"""A request's headers and its reply at the level of ASGI, where nothing is added or rewritten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import orjson

from ..errors import InvalidRequest, LightningError
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
        raise InvalidRequest("the only Transfer-Encoding that is understood is chunked, in HTTP/1.1")
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

    async def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        if status != 204:  # RFC 9110, section 8.6
            headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self.start(status, headers)
        await self.body(body, more=False)

    async def json(self, status: int, body: Any, headers: Iterable[Header] = ()) -> None:
        await self.whole(status, [(b"content-type", b"application/json"), *headers], orjson.dumps(body))

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
