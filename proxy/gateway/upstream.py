"""Passes bytes and headers to and from an upstream unchanged, and turns its failures into our errors.

`Upstream` is the destination of a call, `Request` what is sent to it, `Answer` what comes back.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from hashlib import blake2b
from posixpath import relpath
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
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
_CREDENTIALS = frozenset(b"authorization x-api-key api-key".split())
# By whether the agent's credentials stay here, and whether the answer is to come uncompressed.
_NOT_PASSED_ON = {
    (stay, identity): _HOP_BY_HOP.union(
        _OUR_REQUEST_HEADERS, _CREDENTIALS if stay else (), (b"accept-encoding",) if identity else ()
    )
    for stay in (False, True)
    for identity in (False, True)
}
_HOP_BY_HOP_AND_LENGTH = _HOP_BY_HOP | {b"content-length"}

# A server that closed an idle connection refuses what comes over it at once; a later end is one of the work itself.
IDLE_CLOSED_S = 1.0
_NEW = ContextVar("a new connection", default=False)


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
        if len(pieces) == 1 and isinstance(pieces[0], bytes):
            return self._replace(body=pieces[0], pieces=())
        if sum(map(len, pieces)) < LARGE:
            return self._replace(body=b"".join(pieces), pieces=())
        return self._replace(pieces=pieces)

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


class _ClosedWhileIdle(aiohttp.ServerDisconnectedError):
    """The server had closed the connection, which had served a request before, when this request came."""


class _Connector(aiohttp.TCPConnector):
    """Takes no used connection where `_NEW` says so."""

    async def _get(self, *args: Any) -> Any:
        return None if _NEW.get() else await super()._get(*args)


class _Protocol(ResponseHandler):
    """A connection to an upstream. Tells when it was closed while it was idle.

    Wakes the reader of a body when its connection ends; after a malformed chunk aiohttp would let it wait.
    """

    _requests, _asked_at, _answers = 0, 0.0, False

    def set_response_params(self, **params: Any) -> None:
        self._requests, self._asked_at, self._answers = self._requests + 1, self._loop.time(), False
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        self._answers = True
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        is_lost = isinstance(exc, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        if is_lost and self._requests > 1 and not self._answers and self._loop.time() < self._asked_at + IDLE_CLOSED_S:
            exc = _ClosedWhileIdle()
        super().set_exception(exc, *cause)

    def connection_lost(self, exc: BaseException | None) -> None:
        payload = self._payload
        super().connection_lost(exc)
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("its answer is malformed"))


def make_session() -> aiohttp.ClientSession:
    """Return a session that changes nothing: no connection limit, no cookies, no own headers, untouched bodies."""
    # vLLM's server closes idle connections after 5 s; a request must not meet one that is just being closed.
    connector = _Connector(limit=0, keepalive_timeout=4, ttl_dns_cache=60)
    connector._factory = partial(_Protocol, loop=asyncio.get_running_loop())  # type: ignore[assignment]
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


class HttpUpstream:
    """Servers with the agents' protocol: a single one, or replicas. A rollout keeps to one replica."""

    def __init__(
        self, config: UpstreamConfig, session: aiohttp.ClientSession, health: Health, vouching: Mapping[str, str]
    ) -> None:
        self._config = config
        self._vouching = tuple(vouching.items())
        self._session = session
        self._health = health
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s)

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
        """Do nothing: the session is closed where it was opened."""

    async def _open(self, base_url: str, request: Request) -> HttpAnswer:
        """Send the request; once more, over a new connection, if the server had closed this one before it came."""
        try:
            return await self._send(base_url, request)
        except _ClosedWhileIdle:
            taken = _NEW.set(True)
            try:
                return await self._send(base_url, request)
            finally:
                _NEW.reset(taken)

    async def _send(self, base_url: str, request: Request) -> HttpAnswer:
        upstream = self._config
        try:
            async with asyncio.timeout(upstream.first_byte_timeout_s):
                response = await self._session.request(
                    request.method,
                    _url(base_url, request.path, request.query),
                    headers=[*_request_headers(upstream, request), *self._vouching],
                    data=_payload(request),
                    allow_redirects=False,
                    auto_decompress=request.identity,
                    timeout=self._timeout,
                    **through(upstream, base_url),
                )
        except aiohttp.ConnectionTimeoutError:
            raise NoConnectionInTime(
                f"upstream {upstream.name}: no connection within {upstream.connect_timeout_s} s"
            ) from None
        except TimeoutError:
            raise UpstreamTimeout(
                f"upstream {upstream.name}: no answer within {upstream.first_byte_timeout_s} s"
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise NoConnection(f"upstream {upstream.name} cannot be reached: {why_it_failed(error)}") from None
        except _ClosedWhileIdle:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _broken_off(upstream, error) from None
        if not 200 <= response.status <= 599:
            response.close()
            raise UpstreamUnreachable(f"upstream {upstream.name} answered with status {response.status}")
        if response.connection is not None and (protocol := response.connection.protocol) is not None:
            protocol.read_timeout = upstream.idle_timeout_s
            protocol.start_timeout()
        return HttpAnswer(upstream, response, decodes=request.identity)


def in_order(upstream: UpstreamConfig, health: Health, rollout_id: str, servers: Sequence[str] = ()) -> Sequence[str]:
    """Return the servers to try for a call of the rollout, at least one; all of them if none is up.

    `servers`: the only ones that may answer it; empty if all may.
    By rendezvous hashing: a rollout keeps to one server, whose prefix cache knows it, and only the rollouts of a server
    that goes down move.
    """
    if len(upstream.urls) == 1:
        return upstream.urls
    allowed = servers or upstream.urls
    up = [url for url in allowed if not health.problems.get((upstream.name, url))]
    return sorted(
        up or allowed, key=lambda url: blake2b(f"{url} {rollout_id}".encode(), digest_size=8).digest(), reverse=True
    )


class HttpAnswer(Answer):
    """An answer whose headers are there and whose body is on its way."""

    def __init__(self, config: UpstreamConfig, response: aiohttp.ClientResponse, *, decodes: bool) -> None:
        is_stream = response.status == 200 and response.content_type == "text/event-stream"
        super().__init__(response.status, is_stream=is_stream, retry_after=response.headers.get("Retry-After", ""))
        self._config = config
        self._decodes = decodes
        self._response = response
        self._mask = KeyMask(*config.masked) if config.masked else None

    def release(self) -> None:
        self._response.release()

    def headers(self, *, keep_length: bool) -> list[Header]:
        """Return the upstream's headers, less those of the connection.

        Without `keep_length` its length goes too; so does an encoding that was undone.
        """
        response, mask = self._response, self._mask
        headers = [(name.lower(), value) for name, value in response.raw_headers]
        dropped = _HOP_BY_HOP if keep_length else _HOP_BY_HOP_AND_LENGTH
        if self._decodes and response.headers.get("Content-Encoding", "").lower() in _DECODED:
            dropped = _HOP_BY_HOP_AND_LENGTH | {b"content-encoding"}
        if named := _named_by_connection(headers):
            dropped |= named
        kept = [header for header in headers if header[0] not in dropped]
        if "Location" in response.headers:
            to = _location(self._config, response.url, response.headers["Location"].encode("utf-8", "surrogateescape"))
            kept = [(name, to if name == b"location" else value) for name, value in kept]
        return kept if mask is None else [(name, mask.once(value)) for name, value in kept]

    async def _next(self) -> bytes:
        config, mask = self._config, self._mask
        try:
            data = await self._response.content.readany()
            while mask is not None and data and not (data := mask.feed(data)):
                data = await self._response.content.readany()
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {config.name}: nothing for {config.idle_timeout_s} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _broken_off(config, error) from None
        return data if data or mask is None else mask.end()


def _location(upstream: UpstreamConfig, requested: URL, value: bytes) -> bytes:
    """A redirect's target; within the upstream it is made relative to the request, so that the agent stays with us.

    Servers name themselves by the Host that we send, with the scheme that they assume.
    """
    if not value.startswith((b"/", b"http://", b"https://")):
        return value
    try:
        to = requested.join(URL(_text(value), encoded=True))
    except ValueError:
        return value
    base = next(path for url in upstream.urls if requested.raw_path.startswith(path := URL(url).raw_path + "/"))
    if to.host_port_subcomponent != requested.host_port_subcomponent or not to.raw_path.startswith(base):
        return value
    directory, _, name = to.raw_path.rpartition("/")
    query = f"?{to.raw_query_string}" if to.raw_query_string else ""
    return f"{relpath(directory, requested.raw_path.rpartition('/')[0])}/{name}{query}".encode()


def _request_headers(upstream: UpstreamConfig, request: Request) -> list[tuple[str, str]]:
    identity = request.identity or upstream.api_key is not None or bool(upstream.masked)  # to find the key in it
    dropped = _NOT_PASSED_ON[upstream.api_key is not None or not request.forward_authorization, identity]
    if named := _named_by_connection(request.headers):
        dropped |= named
    if upstream.session_header is not None and request.rollout_id:
        dropped |= {upstream.session_header.lower().encode()}
    kept = [(name.decode("latin-1"), _text(value)) for name, value in request.headers if name not in dropped]
    if upstream.session_header is not None and request.rollout_id:
        kept.append((upstream.session_header, request.rollout_id))
    if request.method != "OPTIONS":  # perhaps a browser's, which needed no key
        kept += upstream.credentials.items()
    if identity:
        kept.append(("accept-encoding", "identity"))
    return kept


def _named_by_connection(headers: Iterable[Header]) -> set[bytes]:
    """The headers that `Connection` says are for one hop only. `headers` have lower-case names."""
    return {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}


class _Pieces(aiohttp.Payload):
    """A body in pieces, none of which is copied before it is written. `sent` is called at its end."""

    def __init__(self, pieces: Sequence[Piece], sent: Callable[[], None] | None) -> None:
        super().__init__(pieces)
        self._size, self._sent = sum(map(len, pieces)), sent

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value:
            await writer.write(piece)
        if self._sent is not None:
            self._sent()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)


def _payload(request: Request) -> aiohttp.Payload | None:
    if request.pieces or request.sent:
        return _Pieces(request.pieces or (request.body,), request.sent)
    return aiohttp.BytesPayload(request.body) if request.body else None


@lru_cache(1024)
def _url(base_url: str, path: str, query: bytes) -> URL:
    url = below(base_url, quote(path.removeprefix("/v1"), safe=_QUERY_SAFE))
    if query:
        url += ("&" if "?" in url else "?") + quote(query, safe=_QUERY_SAFE)
    return URL(url, encoded=True)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _broken_off(upstream: UpstreamConfig, error: Exception) -> UpstreamUnreachable:
    """The error to show for an answer that broke off. aiohttp's own may quote what was received."""
    text = KeyMask(*upstream.masked).once(why_it_failed(error).encode()).decode()
    return UpstreamUnreachable(f"upstream {upstream.name} broke off: {text}")
