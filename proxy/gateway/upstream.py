"""Passes bytes and headers to and from an upstream unchanged, and turns its failures into our errors.

`Upstream` is the destination of a call, `Request` what is sent to it, `Answer` what comes back.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from posixpath import relpath
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from yarl import URL

from ...core.config.upstreams import UpstreamConfig, below
from ...core.errors import UpstreamTimeout, UpstreamUnreachable
from ...core.http import LARGE, through, why_it_failed
from ...core.records import Header
from ...serving.health import Health

Piece = bytes | memoryview

log = logging.getLogger(__name__)

# RFC 9110, section 7.6.1, and headers about the connection to us alone.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding"
    b" upgrade".split()
)
_OUR_REQUEST_HEADERS = frozenset(
    b"host content-length expect x-rollout-id x-task-id x-agent-name x-rollout-mode x-recording".split()
)
_QUERY_SAFE = "%/:@!$&'()*+,;=~?[]{}|\"<>^`\\"
# Of one answer's headers; more are a fault.
MAX_HEADER_BYTES = 256 * 1024
MAX_HEADERS = 1000
# What aiohttp decodes.
_DECODED = frozenset(["gzip", "deflate", "br", "zstd"])
_HOP_BY_HOP_AND_LENGTH = _HOP_BY_HOP | {b"content-length"}
_CREDENTIALS = frozenset(b"authorization x-api-key api-key".split())
_WITHOUT_BODY = frozenset(["GET", "HEAD", "OPTIONS"])

# A server that closed an idle connection refuses what comes over it at once; a later end is one of the work itself.
IDLE_CLOSED_S = 1.0


class Route(NamedTuple):
    """Says where a call goes: upstream, model name (None: the agent's) and policy version (None: not ours).

    `fallbacks`: where it goes instead, in this order, if the upstream does not answer it.
    `pins`: the rollout keeps this version; False where the agent asked for the version by its own name.
    `adds_usage`: the upstream's streams have a usage chunk whether or not one asks for it.
    `servers`: the URLs of the only servers that may answer; empty if all may.
    """

    upstream: UpstreamConfig
    model: str | None
    version: int | None
    fallbacks: tuple[Route, ...] = ()
    pins: bool = True
    adds_usage: bool = False
    servers: tuple[str, ...] = ()


class Request(NamedTuple):
    """A request as it goes upstream.

    `path`: percent-encoded, from /v1/ on. `headers`: the agent's. `identity`: the answer is to come uncompressed.
    `rollout_id`: requests with the same one go to the same replica. `pieces`: what is sent in place of `body` where
    that is large and hardly changed, so that it is not copied. `servers`: as those of `Route`. `sent` is called when a
    large body was sent.
    """

    method: str
    path: str
    query: bytes
    headers: list[Header]
    body: bytes
    forward_authorization: bool
    identity: bool = False
    rollout_id: str = ""
    pieces: tuple[Piece, ...] = ()
    servers: tuple[str, ...] = ()
    sent: Callable[[], None] | None = None

    def with_body(self, *pieces: Piece) -> Request:
        """Return the request with these pieces for its body, which are joined if they are small."""
        is_large = len(pieces) > 1 and sum(map(len, pieces)) >= LARGE
        return self._replace(pieces=pieces) if is_large else self._replace(body=b"".join(pieces), pieces=())

    def with_members(self, members: bytes) -> Request:
        """Return the request with the members of a JSON object at the end of its own, which has some."""
        *before, last = self.pieces or (self.body.rstrip(),)
        return self.with_body(*before, memoryview(last)[:-1], b"," + members[1:])

    def sent_body(self) -> bytes:
        """Return the bytes that are sent."""
        return b"".join(self.pieces) if self.pieces else self.body


# What may stand before the first line of a stream, and before JSON: a byte order mark, blanks.
_BEFORE = b"\xef\xbb\xbf \t\r\n"
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class Answer(ABC):
    """An upstream's answer that has begun: its status and headers are known. `is_stream`: of server-sent events."""

    _ahead = b""  # was read, and waits for `piece`

    def __init__(self, status: int, *, is_stream: bool, retry_after: str = "") -> None:
        self.status = status
        self.is_stream = is_stream
        self.retry_after = retry_after

    @abstractmethod
    def headers(self, *, keep_length: bool) -> list[Header]:
        """Return the headers for the agent, without Content-Length if the body may change or was decoded."""

    @abstractmethod
    async def _next(self) -> bytes: ...

    @abstractmethod
    def release(self) -> None:
        """Release the answer's connection, even if the body was not read to its end."""

    @property
    def at_end(self) -> bool:
        """Return whether the end of the body is there already, and nothing is left to read."""
        return False

    async def piece(self) -> bytes:
        """Return the next bytes of the body; none at its end.

        Raise UpstreamUnreachable if it breaks off, UpstreamTimeout if it stalls.
        """
        if not self._ahead:
            return await self._next()
        data, self._ahead = self._ahead, b""
        return data

    async def read(self) -> bytes:
        """Return the entire body, which `piece` and `read` will return again. Errors are those of `piece`."""
        parts = []
        while data := await self.piece():
            parts.append(data)
        self._ahead = b"".join(parts)
        return self._ahead

    async def sniff(self, *, wants_stream: bool) -> None:
        """Find out by the body's first bytes whether it is a stream: some servers name it wrongly."""
        if self.status != 200 or not (self.is_stream or wants_stream):
            return
        ahead = head = b""
        while not head or (not self.is_stream and any(field.startswith(head) for field in _FIELDS)):
            if not (data := await self.piece()):
                break
            ahead += data
            head = ahead[:1000].lstrip(_BEFORE)
        else:
            self.is_stream = not head.startswith((b"{", b"[")) if self.is_stream else head.startswith(_FIELDS)
        self._ahead = ahead


class Upstream(Protocol):
    """One configured upstream in use."""

    async def open(self, request: Request) -> Answer:
        """Send the request and wait for the answer to begin. Raises UpstreamUnreachable, UpstreamTimeout, Unsupported.

        NoConnection if it did not reach the upstream.
        """

    async def close(self) -> None: ...


class NoConnection(UpstreamUnreachable):
    """The request did not reach the upstream."""


class NoConnectionInTime(UpstreamTimeout, NoConnection):
    """The upstream did not accept a connection in time."""


class KeyMask:
    """Masks the upstream's own keys in one answer: some upstreams name it when they refuse it, or echo headers.

    As many asterisks stand in the place of a key, so that lengths stay true.
    """

    def __init__(self, *keys: str) -> None:
        self._keys = [key.encode() for key in keys]
        self._held = b""

    def once(self, data: bytes) -> bytes:
        """Mask the key in data that is complete."""
        for key in self._keys:
            data = data.replace(key, b"*" * len(key))
        return data

    def feed(self, data: bytes) -> bytes:
        """Return the next piece of a body, without an end that may be the beginning of the key."""
        data = self.once(self._held + data)
        size = max((n for key in self._keys for n in range(1, len(key)) if data.endswith(key[:n])), default=0)
        self._held = data[len(data) - size :]
        return data[: len(data) - size]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held


class _ClosedWhileIdle(Exception):
    """The server had closed the connection, which had served a request before, when this request came."""


class _Protocol(ResponseHandler):
    """A connection to an upstream; `used` once a request was sent over it.

    Wakes the reader of a body when its connection ends; after a malformed chunk aiohttp would let it wait. And aiohttp
    would resume reading with every chunk that is taken, which costs more than the chunk does.
    """

    used = False

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        payload = self._payload
        super().connection_lost(exc)
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("its answer is malformed"))


def _connector(**options: Any) -> aiohttp.TCPConnector:
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, **options)
    connector._factory = partial(_Protocol, loop=asyncio.get_running_loop())  # type: ignore[assignment]
    return connector


def make_session() -> aiohttp.ClientSession:
    """Return a session whose connections are not limited, and tell how they end."""
    # vLLM's server closes idle connections after 5 s; a request must not meet one that is just being closed.
    return aiohttp.ClientSession(connector=_connector(keepalive_timeout=4))


class HttpUpstream:
    """Servers with the agents' protocol: a single one, or replicas. A rollout keeps to one replica.

    A request is written to a connection of aiohttp's, which its session would take three times as long for.
    """

    def __init__(
        self, config: UpstreamConfig, session: aiohttp.ClientSession, health: Health, vouching: Mapping[str, str]
    ) -> None:
        assert session.connector is not None
        self._config, self._health = config, health
        self._vouching = [(name.encode(), value.encode()) for name, value in vouching.items()]
        self._connector, self._new = session.connector, _connector(force_close=True)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s)
        self._ways: dict[str, aiohttp.ClientRequest] = {}  # to each server, for the connector

    async def open(self, request: Request) -> HttpAnswer:
        """Send the request; if there is no connection, send it to the rollout's next replica."""
        *others, last = in_order(self._config, self._health, request.rollout_id, request.servers)
        for url in others:
            try:
                return await self._open(url, request)
            except NoConnection as error:
                log.warning("%s; the next replica is tried", error.message)
        return await self._open(last, request)

    async def close(self) -> None:
        await self._new.close()

    async def _open(self, base_url: str, request: Request) -> HttpAnswer:
        """Send the request; once more, over a new connection, if the server had closed this one before it came."""
        config = self._config
        try:
            async with asyncio.timeout(config.first_byte_timeout_s):
                try:
                    return await self._send(self._connector, base_url, request)
                except _ClosedWhileIdle:
                    return await self._send(self._new, base_url, request)
        except aiohttp.ClientConnectorError as error:
            raise NoConnection(f"upstream {config.name} cannot be reached: {why_it_failed(error)}") from None
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {config.name}: no answer within {config.first_byte_timeout_s} s") from None
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            raise _broken_off(config, error) from None

    async def _send(self, connector: aiohttp.BaseConnector, base_url: str, request: Request) -> HttpAnswer:
        """Send the request, and return the answer when its status and headers are there."""
        config, url = self._config, _url(base_url, request.path, request.query)
        if (way := self._ways.get(base_url)) is None:
            more = through(config, base_url)
            way = aiohttp.ClientRequest("GET", URL(base_url), loop=asyncio.get_running_loop(), **more)
            self._ways[base_url] = way
        try:
            connection = await connector.connect(way, [], self._timeout)
        except TimeoutError:
            raise NoConnectionInTime(
                f"upstream {config.name}: no connection within {config.connect_timeout_s} s"
            ) from None
        try:
            writing = _write(
                connection, _head(way, url, [*_headers(config, request), *self._vouching], request), request
            )
            message, content = await _begun(connection, request, config)
        except BaseException:
            connection.close()
            raise
        return HttpAnswer(config, connection, message, content, url=url, decodes=request.identity, writing=writing)


def _write(connection: Connection, head: bytes, request: Request) -> asyncio.Task[None] | None:
    """Send the request; a large one in pieces that are not copied, as the server takes them."""
    protocol = connection.protocol
    assert protocol is not None and protocol.transport is not None
    if not (request.pieces or request.sent):
        protocol.transport.write(head + request.body)
        return None

    async def write() -> None:
        for piece in (head, *(request.pieces or (request.body,))):
            if protocol.transport is None or protocol.transport.is_closing():
                return  # who reads the answer sees why
            protocol.transport.write(piece)
            with suppress(aiohttp.ClientError):
                await protocol._drain_helper()
        if request.sent is not None:
            request.sent()

    return asyncio.create_task(write())


async def _begun(
    connection: Connection, request: Request, config: UpstreamConfig
) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
    """Return the answer's status and headers, and its body, which is to come. Raise _ClosedWhileIdle."""
    protocol, now = connection.protocol, asyncio.get_running_loop().time
    assert isinstance(protocol, _Protocol)
    was_used, protocol.used, asked_at = protocol.used, True, now()
    protocol.set_response_params(
        skip_payload=request.method == "HEAD",
        read_until_eof=True,
        auto_decompress=request.identity,
        read_timeout=config.idle_timeout_s,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
    )
    try:
        message, content = await protocol.read()
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        if was_used and now() < asked_at + IDLE_CLOSED_S:
            raise _ClosedWhileIdle from None
        raise
    while 100 <= message.code < 200 and message.code != 101:
        message, content = await protocol.read()
    if not 200 <= message.code <= 599:
        raise UpstreamUnreachable(f"upstream {config.name} answered with status {message.code}")
    return message, content


def _head(way: aiohttp.ClientRequest, url: URL, headers: Iterable[Header], request: Request) -> bytes:
    """The request's first line and headers, with the passwords of the server's address, and of the way to it.

    A proxy gets the whole URL.
    """
    is_whole = way.proxy is not None and not way.is_ssl()
    target, host = str(url.with_user(None)) if is_whole else url.raw_path_qs, url.host_port_subcomponent
    passwords = [name for name in ("Authorization", "Proxy-Authorization") if name in way.headers]
    ours = {name.lower().encode(): way.headers[name].encode() for name in passwords}
    kept = [header for header in headers if header[0] not in ours]
    lines = [b"%s: %s\r\n" % header for header in (*kept, *ours.items())]
    size = sum(map(len, request.pieces)) or len(request.body)
    if size or request.method not in _WITHOUT_BODY:
        lines.append(b"Content-Length: %d\r\n" % size)
    return b"".join([f"{request.method} {target} HTTP/1.1\r\nHost: {host}\r\n".encode(), *lines, b"\r\n"])


def in_order(upstream: UpstreamConfig, health: Health, rollout_id: str, servers: Sequence[str] = ()) -> Sequence[str]:
    """Return the servers to try for a call of the rollout, at least one; all of them if none is up.

    `servers`: the only ones that may answer it; empty if all may.
    By rendezvous hashing: a rollout keeps to one server, whose prefix cache knows it, and only the rollouts of a server
    that goes down move.
    """
    if len(upstream.urls) == 1:
        return upstream.urls
    allowed = servers or upstream.urls
    return sorted(
        health.up(upstream, allowed) or allowed,
        key=lambda url: blake2b(f"{url} {rollout_id}".encode(), digest_size=8).digest(),
        reverse=True,
    )


class HttpAnswer(Answer):
    """An answer on its way, over a connection that is its own until it is released."""

    def __init__(
        self,
        config: UpstreamConfig,
        connection: Connection,
        message: RawResponseMessage,
        content: aiohttp.StreamReader,
        *,
        url: URL,
        decodes: bool,
        writing: asyncio.Task[None] | None,
    ) -> None:
        kind = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        is_stream = message.code == 200 and kind == "text/event-stream"
        super().__init__(message.code, is_stream=is_stream, retry_after=message.headers.get("Retry-After", ""))
        self._config, self._connection, self._message, self._content = config, connection, message, content
        self._url, self._decodes, self._writing = url, decodes, writing
        self._mask = KeyMask(*config.masked) if config.masked else None

    @property
    def at_end(self) -> bool:
        return not self._ahead and self._mask is None and self._content.at_eof()

    def release(self) -> None:
        """Give the connection back; close it if not all of the request was sent, or of the answer read."""
        if self._writing is None or self._writing.done():
            self._connection.release()
        else:
            self._connection.close()

    __del__ = release

    def headers(self, *, keep_length: bool) -> list[Header]:
        """Return the upstream's headers, less those of the connection.

        Without `keep_length` its length goes too; so does an encoding that was undone.
        """
        message, mask = self._message, self._mask
        headers = [(name.lower(), value) for name, value in message.raw_headers]
        dropped = _HOP_BY_HOP if keep_length else _HOP_BY_HOP_AND_LENGTH
        if self._decodes and message.headers.get("Content-Encoding", "").lower() in _DECODED:
            dropped = _HOP_BY_HOP_AND_LENGTH | {b"content-encoding"}
        if named := _named_by_connection(headers):
            dropped |= named
        kept = [header for header in headers if header[0] not in dropped]
        if "Location" in message.headers:
            kept = [(n, _location(self._config, self._url, v) if n == b"location" else v) for n, v in kept]
        return kept if mask is None else [(name, mask.once(value)) for name, value in kept]

    async def _next(self) -> bytes:
        config, mask = self._config, self._mask
        try:
            data = await self._content.readany()
            while mask is not None and data and not (data := mask.feed(data)):
                data = await self._content.readany()
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {config.name}: nothing for {config.idle_timeout_s} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _broken_off(config, error) from None
        return data if data or mask is None else mask.end()


def _location(upstream: UpstreamConfig, requested: URL, value: bytes) -> bytes:
    """A redirect's target; within the upstream it is made relative to the request, so that the agent stays with us.

    Servers name themselves by the Host that we send, with the scheme that they assume.
    """
    try:
        to = requested.join(URL(value.decode(errors="surrogateescape"), encoded=True))
    except ValueError:
        return value
    base = next(path for url in upstream.urls if requested.raw_path.startswith(path := URL(url).raw_path + "/"))
    if to.host_port_subcomponent != requested.host_port_subcomponent or not to.raw_path.startswith(base):
        return value
    directory, _, name = to.raw_path.rpartition("/")
    query = f"?{to.raw_query_string}" if to.raw_query_string else ""
    path = f"{relpath(directory, requested.raw_path.rpartition('/')[0])}/{name}{query}"
    return path.encode(errors="surrogateescape") if value.startswith((b"/", b"http://", b"https://")) else value


@lru_cache
def _not_passed_on(stay: bool, identity: bool, session: bytes | None) -> frozenset[bytes]:
    return _HOP_BY_HOP.union(
        _OUR_REQUEST_HEADERS,
        _CREDENTIALS if stay else (),
        [b"accept-encoding"] if identity else (),
        [session.lower()] if session else (),
    )


def _headers(upstream: UpstreamConfig, request: Request) -> list[Header]:
    """The agent's headers, less those for us, with the upstream's own."""
    identity = request.identity or upstream.api_key is not None or bool(upstream.masked)  # to find the key in it
    session = upstream.session_header.encode() if upstream.session_header and request.rollout_id else None
    stay = upstream.api_key is not None or not request.forward_authorization
    dropped = _not_passed_on(stay, identity, session)
    if named := _named_by_connection(request.headers):
        dropped |= named
    kept = [header for header in request.headers if header[0] not in dropped]
    if session is not None:
        kept.append((session, request.rollout_id.encode()))
    if request.method != "OPTIONS":  # perhaps a browser's, which needed no key
        kept += [(name.encode(), value.encode()) for name, value in upstream.credentials.items()]
    if identity:
        kept.append((b"accept-encoding", b"identity"))
    return kept


def _named_by_connection(headers: Iterable[Header]) -> set[bytes]:
    """The headers that `Connection` says are for one hop only. `headers` have lower-case names."""
    return {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}


@lru_cache(1024)
def _url(base_url: str, path: str, query: bytes) -> URL:
    url = below(base_url, quote(path.removeprefix("/v1"), safe=_QUERY_SAFE))
    if query:
        url += ("&" if "?" in url else "?") + quote(query, safe=_QUERY_SAFE)
    return URL(url, encoded=True)


def _broken_off(upstream: UpstreamConfig, error: Exception) -> UpstreamUnreachable:
    """The error to show for an answer that broke off. aiohttp's own may quote what was received."""
    text = KeyMask(*upstream.masked).once(why_it_failed(error).encode()).decode()
    return UpstreamUnreachable(f"upstream {upstream.name} broke off: {text}")
