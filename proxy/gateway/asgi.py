"""Reads requests and sends replies at the ASGI level. Limits the memory of large bodies and answers."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from ...core.config.server import ProxyConfig
from ...core.errors import InvalidRequest, LightningError, Overloaded, RequestTimeout, TooLarge, UnsupportedMediaType
from ...core.http import LARGE, in_thread_if_large
from ...core.records import Header

WATCH_AFTER_S = 0.02  # most answers are there by then; a task to watch for the agent's leaving costs more than they do
WAIT_S = 5.0  # for memory
SLOW_S, SLOW_BYTES = 10.0, 10_000  # a body, or an answer, of which less moves in this time is given up
MOST_LAYERS = 4  # encodings that one body may have
PIECE = 2**18  # bytes that are unpacked at a time
MOST_PARTS = 100  # members of gzip and frames of zstd that one body may have
_WINDOW = 23  # 8 MB, the most that zstd may need over HTTP: RFC 9659, section 3
_PLAIN = ("", "identity")


class ClientDisconnected(Exception):
    """The client left before its request was complete."""


# These headers decide something: if one is sent twice, we might take one value and another server the other.
_ONCE = frozenset([
    "host", "authorization", "x-api-key", "api-key", "x-rollout-id", "x-task-id", "x-agent-name", "x-rollout-mode",
    "x-recording", "idempotency-key", "transfer-encoding",
])  # fmt: skip


def read_headers(scope: Scope) -> dict[str, str]:
    """Return headers by lower-case name. Raises InvalidRequest for ambiguous ones or a bad Transfer-Encoding."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name in headers:
            if name in _ONCE:
                raise InvalidRequest(f"the header {name} is sent more than once", param=name)
            value = f"{headers[name]}, {value}"
        headers[name] = value
    encoding = headers.get("transfer-encoding")
    if encoding is not None and (encoding.lower() != "chunked" or scope["http_version"] == "1.0"):
        raise InvalidRequest("Transfer-Encoding must be chunked, and is allowed only in HTTP/1.1")
    return headers


@dataclass(eq=False, slots=True)
class Reply:
    """The reply to one request, as the agent gets it."""

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
        """Run the block. If the agent leaves, set `agent_left`, and cancel the block `finish_s` seconds later."""
        task, loop, cancelled = asyncio.current_task(), asyncio.get_running_loop(), False
        assert task is not None
        watches: list[asyncio.Task[None]] = []

        async def watch() -> None:
            nonlocal cancelled
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.agent_left = True
            await asyncio.sleep(finish_s)
            cancelled = task.cancel()

        later = loop.call_later(WATCH_AFTER_S, lambda: watches.append(loop.create_task(watch())))
        try:
            yield
        except asyncio.CancelledError:
            if not cancelled or task.uncancel() > 0:  # not by this block alone
                raise
        finally:
            later.cancel()
            for one in watches:
                one.cancel()


class Bodies:
    """Reads the bodies of a process's requests. A body that arrives in one piece, as most do, takes no `memory`."""

    def __init__(self, config: ProxyConfig) -> None:
        self.limit = int(config.max_body_mb * 1_000_000)
        self.memory = Memory(int(config.max_bodies_mb * 1_000_000), self.limit)
        self._seconds = config.body_timeout_s

    async def read(self, receive: Receive, headers: Mapping[str, str], loan: Loan) -> bytes:
        """Return the body, which `loan` may hold. Raises TooLarge, RequestTimeout, Overloaded or ClientDisconnected."""
        length, now = headers.get("content-length", ""), asyncio.get_running_loop().time
        self._require_size(int(length) if length.isdecimal() else 0)
        body, seen, end, slow_at = bytearray(), 0, now() + self._seconds, now() + SLOW_S
        try:
            async with asyncio.timeout_at(min(end, slow_at)) as limit:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    piece, more = message.get("body", b""), message.get("more_body")
                    self._require_size(len(body) + len(piece))
                    if not (body or more):
                        return bytes(piece)
                    limit.reschedule(None)  # the wait for memory is not the sender's fault
                    await loan.grow(len(piece))
                    body += piece
                    if not more:
                        return bytes(body)
                    if len(body) >= seen + SLOW_BYTES:
                        seen, slow_at = len(body), now() + SLOW_S
                    limit.reschedule(min(end, slow_at))
        except TimeoutError:
            late = f"the request's body did not arrive within {self._seconds:g} s (proxy.body_timeout_s)"
            slow = f"less than {SLOW_BYTES} bytes of the request's body arrived in {SLOW_S:g} s"
            raise RequestTimeout(late if now() >= end else slow) from None

    def _require_size(self, size: int) -> None:
        if size > self.limit:
            raise TooLarge(f"the request body is larger than {self.limit} bytes (proxy.max_body_mb)")


class Memory:
    """Lends memory to bodies and answers. Each key gets up to a quarter, or the largest body's size if that is more."""

    def __init__(self, size: int, largest: int = 0, wait_s: float = WAIT_S) -> None:
        """`largest`: the size of the largest body, in bytes."""
        self.share, self.wait_s = max(size // 4, largest), wait_s
        self._free = max(size, largest)
        self._of_key, self.not_taken = Counter[Hashable](), Counter[Hashable]()
        self.waiting: dict[Loan, int] = {}  # for how many bytes more, in the order in which they came
        self.changed = asyncio.Event()

    def loan(self, key: Hashable) -> Loan:
        """Return an empty loan. Raise Overloaded if the unread answers of this key take its entire share."""
        if self.not_taken[key] >= self.share:
            raise Overloaded("this key has too many unread answers; read them, then try again")
        return Loan(self, key)

    def has_turn(self, loan: Loan) -> bool:
        """Return whether a waiting loan fits into its key's share and the memory that earlier waiting loans leave."""
        free = self._free
        for other, size in self.waiting.items():
            has_share = self._of_key[other.key] + size <= self.share
            if other is loan or size > free:
                return other is loan and has_share and size <= free
            free -= size * has_share
        return False

    def add(self, key: Hashable, size: int) -> None:
        """Count `size` more bytes as lent, or fewer if it is negative, and wake the waiting loans."""
        self._free -= size
        self._of_key[key] += size
        self.changed.set()


@dataclass(eq=False, slots=True)
class Loan:
    """The memory that a request holds: first for its body, then for its answer. The end of `with` gives it back."""

    _memory: Memory
    key: Hashable
    size: int = 0
    _not_taken: int = 0

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink()

    async def grow(self, size: int) -> None:
        """Wait for `size` more bytes and hold them, up to the key's share in all. Raises Overloaded after `wait_s`."""
        memory = self._memory
        if (size := min(size, memory.share - self.size)) <= 0:
            return
        memory.waiting[self] = size
        try:
            async with asyncio.timeout(memory.wait_s):
                while not memory.has_turn(self):
                    memory.changed.clear()
                    await memory.changed.wait()
            self.size += size
            memory.add(self.key, size)
        except TimeoutError:
            raise Overloaded("too many large requests or answers at once; try again in a moment") from None
        finally:
            del memory.waiting[self]
            memory.changed.set()

    def shrink(self, size: int | None = None) -> None:
        if size := self.size if size is None else min(size, self.size):
            self.size -= size
            self._memory.add(self.key, -size)

    def not_taken(self, size: int) -> None:
        """Note how many bytes of the answer the client has not read yet."""
        self._memory.not_taken[self.key] += size - self._not_taken
        self._memory.add(self.key, size - self._not_taken)
        self._not_taken = size


async def unpack(body: bytes, content_encoding: str, limit: int, loan: Loan) -> bytes:
    """Return the decoded body, held by `loan`. Raises UnsupportedMediaType, TooLarge, InvalidRequest or Overloaded."""
    layers = [name for one in content_encoding.lower().split(",") if (name := one.strip()) not in _PLAIN]
    if len(layers) > MOST_LAYERS or not _UNPACKERS.keys() >= {*layers}:
        known = f"gzip, deflate or zstd, in at most {MOST_LAYERS} layers"
        raise UnsupportedMediaType(f"Content-Encoding must be {known}; got {content_encoding[:60]!r}")
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
    """Yield the content of all members or frames, at most `PIECE` bytes at a time."""
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
    raise InvalidRequest(f"the {name} body has more than {MOST_PARTS} parts")


def _zlib(body: bytes) -> Any:
    """Return a decompressor for gzip, zlib or, as some clients send it, raw deflate without zlib's header."""
    has_header = body[:2] == b"\x1f\x8b" or (len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0)
    return zlib.decompressobj(zlib.MAX_WBITS | 32 if has_header else -zlib.MAX_WBITS)


def _zstd(_: bytes) -> Any:
    zstd = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW})


_UNPACKERS: dict[str, Callable[[bytes], Any]] = dict.fromkeys(("gzip", "x-gzip", "deflate"), _zlib) | {"zstd": _zstd}
