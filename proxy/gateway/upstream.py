"""Sends requests to an upstream and reads its answers: adapts headers, masks keys, turns failures into our errors."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from hashlib import blake2b
from posixpath import relpath
from time import monotonic
from typing import NamedTuple, Protocol
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
Begun = tuple[RawResponseMessage, aiohttp.StreamReader]

log = logging.getLogger(__name__)

# RFC 9110, section 7.6.1, and headers about the connection to us alone.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding"
    b" upgrade".split()
)
_NOT_PASSED_ON = _HOP_BY_HOP.union(
    b"host content-length expect x-rollout-id x-task-id x-agent-name x-rollout-mode x-recording".split()
)
_CREDENTIALS = frozenset(b"authorization x-api-key api-key".split())
_QUERY_SAFE = "%/:@!$&'()*+,;=~?[]{}|\"<>^`\\"
_DECODED = frozenset(["gzip", "deflate", "br", "zstd"])  # by aiohttp
MAX_HEADER_BYTES, MAX_HEADERS = 256 * 1024, 1000  # of an answer; more are a fault
IDLE_CLOSED_S = 1.0  # in which a server refuses what comes over a connection that it had closed


class Route(NamedTuple):
    """Where a call goes, with the fallbacks to try, in order, if the upstream is down, busy or failing."""

    upstream: UpstreamConfig
    model: str | None  # None: the agent's
    version: int | None  # of the policy; None: not ours
    fallbacks: tuple[Route, ...] = ()
    pins: bool = True  # the rollout keeps the version; False where the agent asked for it by its own name
    adds_usage: bool = False  # its streams have a usage chunk whether or not one asks for it
    servers: tuple[str, ...] = ()  # the URLs of the only ones that may answer; empty if all may


class Request(NamedTuple):
    """A request as it goes upstream."""

    method: str
    path: str  # percent-encoded, from /v1/ on
    query: bytes
    headers: list[Header]  # the agent's
    body: bytes
    forward_authorization: bool
    identity: bool = False  # the answer is to come uncompressed
    rollout_id: str = ""  # requests with the same one go to the same replica
    pieces: tuple[Piece, ...] = ()  # what is sent in place of a large `body`, so that it is not copied
    servers: tuple[str, ...] = ()  # as in `Route`
    sent: Callable[[], None] | None = None  # is called once the body was sent

    def with_body(self, *pieces: Piece) -> Request:
        """Return the request with a body of these pieces, joined if they are small."""
        is_large = len(pieces) > 1 and sum(map(len, pieces)) >= LARGE
        return self._replace(pieces=pieces) if is_large else self._replace(body=b"".join(pieces), pieces=())

    def with_members(self, members: bytes) -> Request:
        """Return the request with a JSON object's members appended to its body, which must be a non-empty object."""
        *before, last = self.pieces or (self.body.rstrip(),)
        return self.with_body(*before, memoryview(last)[:-1], b"," + members[1:])

    def sent_body(self) -> bytes:
        return b"".join(self.pieces) if self.pieces else self.body


# What may stand before the first line of a stream, and before JSON: a byte order mark, blanks.
_BEFORE = b"\xef\xbb\xbf \t\r\n"
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class Answer(ABC):
    """An upstream's answer that has begun: its status and headers are known. `is_stream`: it is an event stream."""

    _ahead = b""  # was read, and waits for `piece`

    def __init__(self, status: int, *, is_stream: bool, retry_after: str = "") -> None:
        self.status, self.is_stream, self.retry_after = status, is_stream, retry_after

    @abstractmethod
    def headers(self, *, keep_length: bool) -> list[Header]:
        """Return the headers for the agent, without Content-Length if the body is decoded or `keep_length` is False."""

    @abstractmethod
    async def _next(self) -> bytes: ...

    @abstractmethod
    def release(self) -> None:
        """Release the answer's connection, even if the body was not read to its end."""

    @property
    def at_end(self) -> bool:
        """Return whether nothing is left to read; False if that is not known yet."""
        return False

    async def piece(self) -> bytes:
        """Return the body's next bytes, b"" at the end. Raises UpstreamTimeout or UpstreamUnreachable."""
        if not self._ahead:
            return await self._next()
        data, self._ahead = self._ahead, b""
        return data

    async def read(self) -> bytes:
        """Return the entire body; the next `piece` or `read` returns it again. Raises the same errors as `piece`."""
        parts = []
        while data := await self.piece():
            parts.append(data)
        self._ahead = b"".join(parts)
        return self._ahead

    async def sniff(self, *, wants_stream: bool) -> None:
        """Correct `is_stream` by the body's first bytes if a stream was declared or asked for."""
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
    """A configured upstream that requests can be sent to."""

    async def open(self, request: Request) -> Answer:
        """Return the answer once it has begun. Raises UpstreamUnreachable, UpstreamTimeout or Unsupported."""

    async def close(self) -> None:
        return


class NoConnection(UpstreamUnreachable):
    """The request did not reach the upstream."""


class NoConnectionInTime(UpstreamTimeout, NoConnection):
    """The upstream did not accept the connection in time."""


class KeyMask:
    """Masks the upstream's keys in one answer with asterisks: some servers quote a key that they refuse."""

    def __init__(self, *keys: str) -> None:
        self._keys = [key.encode() for key in keys]
        self._held = b""

    def once(self, data: bytes) -> bytes:
        for key in self._keys:
            data = data.replace(key, b"*" * len(key))
        return data

    def feed(self, data: bytes) -> bytes:
        """Return the next piece of a body, with keys masked. An end that may be the beginning of a key is held back."""
        data = self.once(self._held + data)
        size = max((n for key in self._keys for n in range(1, len(key)) if data.endswith(key[:n])), default=0)
        self._held = data[len(data) - size :]
        return data[: len(data) - size]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held


class _Protocol(ResponseHandler):
    """A connection to an upstream. `uses`: requests sent so far; `answered`: whether the last answer has begun."""

    uses, answered = 0, False
    _sent: Callable[[], None] | None = None

    def ask(self, head: bytes, request: Request, idle_timeout_s: float) -> None:
        """Send the request, without copying a large body."""
        assert self.transport is not None
        self.uses, self.answered, self._sent = self.uses + 1, False, request.sent
        self.set_response_params(
            skip_payload=request.method == "HEAD",
            read_until_eof=True,
            auto_decompress=request.identity,
            read_timeout=idle_timeout_s,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )
        if request.pieces or len(request.body) >= LARGE:
            self.transport.writelines((head, *(request.pieces or (request.body,))))
        else:
            self.transport.write(head + request.body)
        if not self.writing_paused and request.sent is not None:
            request.sent()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sent is not None:
            self._sent()

    @property
    def should_close(self) -> bool:
        return self.writing_paused or super().should_close  # not all of the request was sent

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:  # aiohttp does it with every chunk, which costs more than the chunk
            super().resume_reading(resume_parser)

    def _drop_timeout(self) -> None:
        self.answered |= self._read_timeout_handle is not None  # bytes of an answer start it
        super()._drop_timeout()

    def connection_lost(self, exc: BaseException | None) -> None:
        payload = self._payload
        super().connection_lost(exc)  # lets the reader wait after a malformed chunk
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("its answer is malformed"))


def make_session() -> aiohttp.ClientSession:
    """Return a session without a connection limit. Its connections report malformed answers as errors."""
    # vLLM's server closes idle connections after 5 s; a request must not meet one that is just being closed.
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=4)
    connector._factory = partial(_Protocol, loop=asyncio.get_running_loop())  # type: ignore[assignment]
    return aiohttp.ClientSession(connector=connector)


class HttpUpstream(Upstream):
    """Sends requests to a server or replicas over aiohttp's connections: an aiohttp session is three times slower."""

    def __init__(
        self, config: UpstreamConfig, session: aiohttp.ClientSession, health: Health, vouching: Mapping[str, str]
    ) -> None:
        assert session.connector is not None
        self._config, self._health, self._connector = config, health, session.connector
        self._vouching = {name.encode(): value.encode() for name, value in vouching.items()}
        self._credentials = {name.encode(): value.encode() for name, value in config.credentials.items()}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s)
        loop = asyncio.get_running_loop()
        self._ways = {  # by server: aiohttp's connector finds or opens a connection by a request
            url: aiohttp.ClientRequest("GET", URL(url), loop=loop, **through(config, url)) for url in config.urls
        }

    async def open(self, request: Request) -> HttpAnswer:
        """Send the request to the rollout's server, or to the next one that can be reached."""
        allowed = request.servers or self._config.urls
        if len(self._config.urls) == 1:
            return await self._open(self._config.urls[0], request)
        *others, last = sorted(  # by rendezvous hashing: only the rollouts of a server that goes down move
            self._health.up(self._config, allowed) or allowed,
            key=lambda url: blake2b(f"{url} {request.rollout_id}".encode(), digest_size=8).digest(),
            reverse=True,
        )
        for url in others:
            try:
                return await self._open(url, request)
            except NoConnection as error:
                log.warning("%s; trying the next replica", error.message)
        return await self._open(last, request)

    async def _open(self, base_url: str, request: Request) -> HttpAnswer:
        """Send the request. If the server had already closed the idle connection, send it again on a new one."""
        config, anew = self._config, False
        try:
            async with asyncio.timeout(config.first_byte_timeout_s):
                while (answer := await self._send(base_url, request, anew=anew)) is None:
                    anew = True
                return answer
        except aiohttp.ClientConnectorError as error:
            raise NoConnection(f"upstream {config.name} cannot be reached: {why_it_failed(error)}") from None
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {config.name} sent no answer in {config.first_byte_timeout_s} s") from None
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            raise _broken_off(config, error) from None

    async def _send(self, base_url: str, request: Request, *, anew: bool) -> HttpAnswer | None:
        """Send the request. Return the answer once it has begun, or None if the server had closed the connection."""
        config, way, url = self._config, self._ways[base_url], _url(base_url, request.path, request.query)
        try:
            connection = await self._connector.connect(way, [], self._timeout)
            while anew and getattr(connection.protocol, "uses", False):  # closed, too, or about to be
                connection.close()
                connection = await self._connector.connect(way, [], self._timeout)
        except TimeoutError:
            why = f"upstream {config.name} accepted no connection within {config.connect_timeout_s} s"
            raise NoConnectionInTime(why) from None
        protocol, asked_at = connection.protocol, monotonic()
        assert isinstance(protocol, _Protocol)
        try:
            protocol.ask(self._head(way, url, request), request, config.idle_timeout_s)
            begun = await protocol.read()
            while 100 <= (status := begun[0].code) < 200 and status != 101:
                begun = await protocol.read()
            if not 200 <= status <= 599:
                raise UpstreamUnreachable(f"upstream {config.name} answered with status {status}")
        except BaseException as error:
            connection.close()
            ended = isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))
            if ended and protocol.uses > 1 and not protocol.answered and monotonic() < asked_at + IDLE_CLOSED_S:
                return None
            raise
        return HttpAnswer(config, connection, begun, base=way.url, url=url, decodes=request.identity)

    def _head(self, way: aiohttp.ClientRequest, url: URL, request: Request) -> bytes:
        """Return the request's head: its first line, the agent's headers except those for us, and our own."""
        config, own = self._config, dict(self._vouching)
        if config.session_header and request.rollout_id:
            own[config.session_header.lower().encode()] = request.rollout_id.encode()
        if request.method != "OPTIONS":  # perhaps a browser's, which needed no key
            own |= self._credentials
        if request.identity or config.api_key is not None or config.masked:  # to find the key in it
            own[b"accept-encoding"] = b"identity"
        for name in ("Authorization", "Proxy-Authorization"):
            if name in way.headers:
                own[name.lower().encode()] = way.headers[name].encode()
        dropped = _NOT_PASSED_ON.union(own, _named_by_connection(request.headers))
        if config.api_key is not None or not request.forward_authorization:
            dropped |= _CREDENTIALS
        kept = [header for header in request.headers if header[0] not in dropped]
        target = str(url.with_user(None)) if way.proxy is not None and not way.is_ssl() else url.raw_path_qs
        lines = [f"{request.method} {target} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n".encode()]
        lines += [b"%s: %s\r\n" % header for header in (*kept, *own.items())]
        size = sum(map(len, request.pieces)) or len(request.body)
        if size or request.method not in ("GET", "HEAD", "OPTIONS"):
            lines.append(b"Content-Length: %d\r\n" % size)
        return b"".join([*lines, b"\r\n"])


class HttpAnswer(Answer):
    """An answer that is arriving. It owns its connection until it is released. `base`: the server's URL."""

    def __init__(
        self, config: UpstreamConfig, connection: Connection, begun: Begun, *, base: URL, url: URL, decodes: bool
    ) -> None:
        message, self._content = begun
        kind = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        is_stream = message.code == 200 and kind == "text/event-stream"
        super().__init__(message.code, is_stream=is_stream, retry_after=message.headers.get("Retry-After", ""))
        self._config, self._connection, self._message = config, connection, message
        self._base, self._url, self._decodes = base, url, decodes
        self._mask = KeyMask(*config.masked) if config.masked else None

    @property
    def at_end(self) -> bool:
        return not self._ahead and self._mask is None and self._content.at_eof()

    def release(self) -> None:
        self._connection.release()

    __del__ = release

    def headers(self, *, keep_length: bool) -> list[Header]:
        """Return the upstream's headers for the agent. Redirects within the upstream lead back to us."""
        message, mask = self._message, self._mask
        headers = [(name.lower(), value) for name, value in message.raw_headers]
        dropped = _HOP_BY_HOP.union(_named_by_connection(headers))
        if self._decodes and message.headers.get("Content-Encoding", "").lower() in _DECODED:
            dropped |= {b"content-length", b"content-encoding"}
        elif not keep_length:
            dropped |= {b"content-length"}
        kept = [header for header in headers if header[0] not in dropped]
        if "Location" in message.headers:
            kept = [(name, self._location(value) if name == b"location" else value) for name, value in kept]
        return kept if mask is None else [(name, mask.once(value)) for name, value in kept]

    def _location(self, value: bytes) -> bytes:
        """Return a redirect's target, made relative if it is within the upstream, so that it leads back to us."""
        if not value.startswith((b"/", b"http://", b"https://")):
            return value
        try:
            to = self._url.join(URL(value.decode(errors="surrogateescape"), encoded=True))
        except ValueError:
            return value
        is_here = to.host_port_subcomponent == self._url.host_port_subcomponent
        if not (is_here and to.raw_path.startswith(self._base.raw_path.rstrip("/") + "/")):
            return value
        path = f"{relpath(to.parent.raw_path, self._url.parent.raw_path)}/{to.raw_name}"
        return (path + to.raw_path_qs.removeprefix(to.raw_path)).encode(errors="surrogateescape")

    async def _next(self) -> bytes:
        config, mask = self._config, self._mask
        try:
            data = await self._content.readany()
            while mask is not None and data and not (data := mask.feed(data)):
                data = await self._content.readany()
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {config.name} sent nothing for {config.idle_timeout_s} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _broken_off(config, error) from None
        return data if data or mask is None else mask.end()


def _named_by_connection(headers: Iterable[Header]) -> set[bytes]:
    """Return the names of the headers that `Connection` lists as hop-by-hop. `headers` have lower-case names."""
    return {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}


@lru_cache(1024)
def _url(base_url: str, path: str, query: bytes) -> URL:
    url = below(base_url, quote(path.removeprefix("/v1"), safe=_QUERY_SAFE))
    if query:
        url += ("&" if "?" in url else "?") + quote(query, safe=_QUERY_SAFE)
    return URL(url, encoded=True)


def _broken_off(upstream: UpstreamConfig, error: Exception) -> UpstreamUnreachable:
    """Return the error for an interrupted request or answer, with keys masked: aiohttp may quote received data."""
    text = KeyMask(*upstream.masked).once(why_it_failed(error).encode()).decode()
    return UpstreamUnreachable(f"upstream {upstream.name} failed: {text}")
