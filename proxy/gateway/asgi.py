"""Reads a request's headers and body, and sends its reply, at the level of ASGI: nothing is added or rewritten.

Each body is read in limited size and time, and unpacked: gzip, deflate and zstd, also several on top of each other. All
bodies that are read or unpacked, until they were sent on, and all large answers until they were taken, have limited
memory together.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import orjson

from ...core.config.server import ProxyConfig
from ...core.errors import InvalidRequest, LightningError, Overloaded, RequestTimeout, TooLarge, UnsupportedMediaType
from ...core.http import LARGE, in_thread_if_large
from ...core.records import Header

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

WATCH_AFTER_S = 0.02  # most answers are there by then; a task to watch for the agent's leaving costs more than they do

MOST_LAYERS = 4  # encodings that one body may have
PIECE = 2**18  # bytes that are unpacked at a time
MOST_PARTS = 100  # members of gzip and frames of zstd that one body may have
_WINDOW = 23  # 8 MB, the most that zstd may need over HTTP: RFC 9659, section 3
_PLAIN = ("", "identity")


class ClientDisconnected(Exception):
    """The client left before its request was complete."""


# Where a header decides something, two of them would be one for us and perhaps the other for somebody else.
_ONCE = frozenset([
    "host", "authorization", "x-api-key", "api-key", "x-rollout-id", "x-task-id", "x-agent-name", "x-rollout-mode",
    "x-recording", "idempotency-key", "transfer-encoding",
])  # fmt: skip


def read_headers(scope: Scope) -> dict[str, str]:
    """Return a request's headers by their lower-case names.

    Raises InvalidRequest for two of a kind that may be there only once, and for a body in an encoding that we, or a
    client of HTTP/1.0, do not know.
    """
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if len(headers) < len(scope["headers"]):
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        for name in headers:
            values = [value for other, value in sent if other == name]
            if len(values) > 1 and name in _ONCE:
                raise InvalidRequest(f"the header {name} is there {len(values)} times", param=name)
            headers[name] = ", ".join(values)
    encoding = headers.get("transfer-encoding")
    if encoding is not None and (encoding.lower() != "chunked" or scope["http_version"] == "1.0"):
        raise InvalidRequest("Transfer-Encoding must be chunked, in HTTP/1.1")
    return headers


@dataclass(eq=False, slots=True)
class Reply:
    """The reply to one request, as it is sent to the agent."""

    _receive: Receive
    _send: Send
    _error_body: Callable[[LightningError], dict[str, Any]] = LightningError.body
    started: bool = False
    agent_left: bool = False

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
        task, loop, cancelled = asyncio.current_task(), asyncio.get_running_loop(), False
        assert task is not None
        watch: asyncio.Task[None] | None = None

        async def wait() -> None:
            nonlocal cancelled
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.agent_left = True
            await asyncio.sleep(finish_s)
            cancelled = task.cancel()

        def begin() -> None:
            nonlocal watch
            watch = loop.create_task(wait())

        later = loop.call_later(WATCH_AFTER_S, begin)
        try:
            yield
        except asyncio.CancelledError:
            if not cancelled or task.uncancel() > 0:  # not by this block alone
                raise
        finally:
            later.cancel()
            if watch is not None:
                watch.cancel()


SLOW_S, SLOW_BYTES = 10.0, 10_000  # a body, or an answer, of which less moves in this time is given up


class Bodies:
    """Reads the bodies of a process's requests. What arrives with its head, as most does, takes nothing of `memory`."""

    def __init__(self, config: ProxyConfig) -> None:
        self.limit = int(config.max_body_mb * 1_000_000)
        self.memory = Memory(int(config.max_bodies_mb * 1_000_000), self.limit)
        self._seconds = config.body_timeout_s

    async def read(self, receive: Receive, headers: Mapping[str, str], loan: Loan) -> bytes:
        """Return a request's body. `loan` holds what of it did not come with the head.

        Raises TooLarge, RequestTimeout, Overloaded if too many are being read, and ClientDisconnected.
        """
        length, now = headers.get("content-length", ""), asyncio.get_running_loop().time
        self._require_size(int(length) if length.isdecimal() else 0)
        body, received, seen = bytearray(), 0, 0
        end = now() + self._seconds
        try:
            async with asyncio.timeout_at(min(end, now() + SLOW_S)) as limit:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    piece, more = bytes(message.get("body", b"")), bool(message.get("more_body"))
                    if not (body or more):
                        self._require_size(len(piece))
                        return piece
                    received += len(piece)
                    self._require_size(received)
                    left = (limit.when() or 0.0) - now()
                    limit.reschedule(None)  # the wait for memory is not the sender's fault
                    await loan.grow(len(piece))
                    body += piece
                    if not more:
                        return bytes(body)
                    if received >= seen + SLOW_BYTES:
                        seen, left = received, SLOW_S
                    limit.reschedule(min(end, now() + left))
        except TimeoutError:
            late = f"the request's body did not arrive within {self._seconds:g} s (proxy.body_timeout_s)"
            slow = f"less than {SLOW_BYTES} bytes of the request's body arrived in {SLOW_S:g} s"
            raise RequestTimeout(late if now() >= end else slow) from None

    def _require_size(self, size: int) -> None:
        if size > self.limit:
            raise TooLarge(f"the request body is larger than {self.limit} bytes (proxy.max_body_mb)")


WAIT_S = 5.0


class Memory:
    """Lends a limited number of bytes to bodies and answers, at most a quarter of them, or one body, to one key.

    First come first served: a large loan is not overtaken for ever. A key that has its share holds up no other.
    """

    def __init__(self, size: int, largest: int = 0, wait_s: float = WAIT_S) -> None:
        """`largest`: bytes of the largest body."""
        self.share = max(size // 4, largest)
        self._free = max(size, largest)
        self._wait_s = wait_s
        self._of_key, self.not_taken = Counter[Hashable](), Counter[Hashable]()
        self._queue: deque[tuple[Hashable, int, asyncio.Future[None]]] = deque()

    def loan(self, key: Hashable) -> Loan:
        """Return a loan without bytes. Raise Overloaded if clients with this key do not take their answers."""
        if self.not_taken[key] >= self.share:
            raise Overloaded("too many answers to this key have not been read; try again when they are")
        return Loan(self, key)

    async def take(self, key: Hashable, size: int) -> None:
        """Lend so many bytes, which is at most the share of a key. Raise Overloaded after a wait."""
        turn = (key, size, asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        self._lend()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn[2]
        except BaseException as error:  # a turn that has come just now gives its bytes back
            if turn in self._queue:
                self._queue.remove(turn)
            self.add(key, -size if turn[2].done() and not turn[2].cancelled() else 0)
            self._lend()
            if isinstance(error, TimeoutError):
                raise Overloaded("too many large requests or answers at once; try again in a moment") from None
            raise

    def add(self, key: Hashable, size: int) -> None:
        """Count so many bytes more; fewer if negative: then others may have their turns."""
        self._free -= size
        self._of_key[key] += size
        if size < 0:
            self._lend()

    def _lend(self) -> None:
        for turn in [*self._queue]:
            key, size, come = turn
            if size <= self._free and self._of_key[key] + size <= self.share:
                self._queue.remove(turn)
                if not come.done():  # it is, if the waiting task was cancelled just now
                    self.add(key, size)
                    come.set_result(None)
            elif size > self._free:
                return


@dataclass(eq=False, slots=True)
class Loan:
    """What one request holds of `Memory`: first its body, then its answer. `with` gives the rest back."""

    _memory: Memory
    _key: Hashable
    size: int = 0
    _not_taken: int = 0

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink()

    async def grow(self, size: int) -> None:
        """Hold so many bytes more, but no more than the share of a key: a larger answer has that to itself.

        Raise Overloaded after a wait.
        """
        if (size := min(size, self._memory.share - self.size)) > 0:
            await self._memory.take(self._key, size)
            self.size += size

    def shrink(self, size: int | None = None) -> None:
        """Give so many bytes back, or all of them."""
        size = self.size if size is None else min(size, self.size)
        if size:
            self.size -= size
            self._memory.add(self._key, -size)

    def not_taken(self, size: int) -> None:
        """Count what of the answer has left the app and waits for the client, so many bytes now."""
        self._memory.not_taken[self._key] += size - self._not_taken
        self._memory.add(self._key, size - self._not_taken)
        self._not_taken = size


async def unpack(body: bytes, content_encoding: str, limit: int, loan: Loan) -> bytes:
    """Return the unpacked body, which `loan` holds as it grows.

    Raise TooLarge for more than `limit` bytes, InvalidRequest if it is damaged, Overloaded if memory for it is lacking.
    `content_encoding` names the encodings in the order in which they were applied (RFC 9110, section 8.4).
    """
    layers = [name for one in content_encoding.lower().split(",") if (name := one.strip()) not in _PLAIN]
    if not all(name in _UNPACKERS for name in layers):
        raise UnsupportedMediaType(f"Content-Encoding is gzip, deflate, zstd or none, got {content_encoding[:60]!r}")
    if len(layers) > MOST_LAYERS:
        raise UnsupportedMediaType(f"Content-Encoding names {len(layers)} encodings, the most is {MOST_LAYERS}")
    held = loan.size
    for name in reversed(layers):
        size, parts, pieces = 0, list[bytes](), _pieces(body, name)
        while piece := await in_thread_if_large(LARGE if parts else len(body), partial(next, pieces, b"")):
            size += len(piece)
            if size > limit:
                raise TooLarge(f"the unpacked body is larger than {limit} bytes (proxy.max_body_mb)")
            await loan.grow(len(piece))
            parts.append(piece)
        body = b"".join(parts)
        loan.shrink(held)
        held = size
    return body


def _pieces(body: bytes, name: str) -> Iterator[bytes]:
    """Yield what all members or frames hold, at most `PIECE` bytes at a time."""
    for _ in range(MOST_PARTS):
        unpacker, packed = _UNPACKERS[name](body), body
        while not unpacker.eof:
            try:
                piece = unpacker.decompress(packed, PIECE)
            except Exception as error:  # zlib.error and ZstdError share no class
                raise InvalidRequest(f"the body is not valid {name}: {error}") from None
            if piece:
                yield piece
            elif not unpacker.eof:
                raise InvalidRequest(f"the body is not valid {name}: it is cut off")
            packed = getattr(unpacker, "unconsumed_tail", b"")
        body = unpacker.unused_data
        if not body:
            return
    raise InvalidRequest(f"the body is {name} in more than {MOST_PARTS} parts")


def _zlib(body: bytes) -> Any:
    """Unpack gzip, and zlib's format, as the standard has it, or without its header, as some clients send it."""
    has_header = body[:2] == b"\x1f\x8b" or (len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0)
    return zlib.decompressobj(zlib.MAX_WBITS | 32 if has_header else -zlib.MAX_WBITS)


def _zstd(_: bytes) -> Any:
    zstd = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW})


_UNPACKERS: dict[str, Callable[[bytes], Any]] = dict.fromkeys(("gzip", "x-gzip", "deflate"), _zlib) | {"zstd": _zstd}
