"""Reading a request and sending an answer at the level of ASGI, where nothing is added or rewritten."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any

import orjson

from ..errors import InvalidRequest, LightningError, TooLarge, UnsupportedMediaType

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

WATCH_AFTER_S = 0.02  # most answers are there by then; a task to watch for the agent's leaving costs more than they do


class ClientDisconnected(Exception):
    """The client left before its request was complete."""


# Where a header decides something, two of them would be one for us and perhaps the other for somebody else.
_ONCE = frozenset(
    b"host authorization x-api-key api-key x-rollout-id x-task-id x-agent-name x-rollout-mode x-recording"
    b" idempotency-key transfer-encoding".split()
)


def read_headers(scope: Scope) -> dict[str, str]:
    """A request's headers by their lower-case names.

    Raises InvalidRequest for two of a kind that may be there only once, and for a body in an encoding that we, or a
    client of HTTP/1.0, do not know.
    """
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if len(headers) < len(scope["headers"]):
        for name, n in Counter(name for name, _ in scope["headers"]).items():
            if n > 1 and name in _ONCE:
                raise InvalidRequest(f"the header {name.decode()} is there {n} times", param=name.decode())
    encoding = headers.get("transfer-encoding")
    if encoding is not None and (encoding.lower() != "chunked" or scope["http_version"] == "1.0"):
        raise InvalidRequest("the only Transfer-Encoding that is understood is chunked, in HTTP/1.1")
    return headers


def unpack(body: bytes, content_encoding: str, limit: int) -> bytes:
    """The body without its compression; TooLarge for more than `limit` bytes, InvalidRequest if it is damaged."""
    if content_encoding.lower() in ("", "identity"):
        return body
    if content_encoding.lower() not in ("gzip", "deflate"):
        raise UnsupportedMediaType(f"Content-Encoding is gzip, deflate or none, got {content_encoding[:60]!r}")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of either kind
    try:
        raw = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid {content_encoding}: {error}") from None
    if len(raw) > limit:
        raise TooLarge(f"the unpacked body is larger than {limit} bytes (proxy.max_body_mb)")
    if not unpacker.eof:
        raise InvalidRequest(f"the body is not valid {content_encoding}: it is cut off")
    if unpacker.unused_data:
        raise InvalidRequest(f"the body is {content_encoding} and more: what follows it would be lost")
    return raw


class Agent:
    """The agent's end of one request. `extra` headers of ours go out with whatever answer is sent."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        error_body: Callable[[LightningError], dict[str, Any]] = LightningError.body,
    ) -> None:
        self.receive = receive
        self._error_body = error_body
        self.extra: list[Header] = []
        self.started = False
        self.left = False
        self._send = send

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.extra]})

    async def body(self, data: bytes, more: bool = True) -> None:
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]  # RFC 9110, section 8.6
        await self.start(status, [*headers, *length])
        await self.body(body, more=False)

    async def json(self, status: int, body: Any) -> None:
        await self.answer(status, [(b"content-type", b"application/json")], orjson.dumps(body))

    async def error(self, error: LightningError) -> None:
        headers = [(b"content-type", b"application/json"), *error.headers]
        await self.answer(error.status, headers, orjson.dumps(self._error_body(error)))

    async def read(self, headers: dict[str, str], limit: int) -> bytes:
        """The request's body; raises TooLarge for more than `limit` bytes, ClientDisconnected."""
        length = headers.get("content-length", "")
        declared = int(length) if length.isdecimal() else 0
        body = bytearray()
        while max(len(body), declared) <= limit:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part, more = message.get("body", b""), message.get("more_body")
            if not (body or more) and len(part) <= limit:
                return bytes(part)  # all at once, as most come: it is not copied
            body += part
            if not more and len(body) <= limit:
                return bytes(body)
        raise TooLarge(f"the request body is larger than {limit} bytes (proxy.max_body_mb)")

    async def run_while_connected(self, work: Coroutine[Any, Any, None], *, finish: bool = False) -> None:
        """Run `work` once the request is read; it has ended when this returns.

        When the agent disconnects, `left` is set, and the work is cancelled unless it is to `finish`.
        """
        this, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert this is not None
        cancelled = False
        gone: asyncio.Task[None] | None = None

        async def watch() -> None:
            nonlocal cancelled
            while (await self.receive())["type"] != "http.disconnect":
                pass
            self.left = True
            cancelled = not finish and this.cancel()

        def begin_to_watch() -> None:
            nonlocal gone
            gone = loop.create_task(watch())

        later = loop.call_later(WATCH_AFTER_S, begin_to_watch)
        try:
            await work
        except asyncio.CancelledError:
            if not cancelled or this.uncancel() > 0:
                raise
        finally:
            later.cancel()
            if gone is not None:
                gone.cancel()
