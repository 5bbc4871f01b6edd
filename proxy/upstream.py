"""An upstream as raw passthrough: bytes and headers in and out, its failures as our errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import quote

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from lightning_proxy.proxy.asgi import Header
from lightning_proxy.proxy.config import UpstreamConfig
from lightning_proxy.proxy.errors import UpstreamTimeout, UpstreamUnreachable
from lightning_proxy.proxy.health import Health
from lightning_proxy.proxy.key_mask import SHORTEST_KEY, KeyMask

log = logging.getLogger(__name__)

# RFC 9110, section 7.6.1, and what is only about the connection to us.
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
_DECODED = frozenset(b"gzip deflate br zstd".split())
_CREDENTIALS = frozenset(b"authorization x-api-key api-key".split())


@dataclass(frozen=True, slots=True)
class Request:
    """What goes upstream. `path`: percent-decoded, from /v1/ on; `headers`: the agent's; `identity`: uncompressed.

    `rollout_id`: requests with the same one go to the same replica.
    """

    method: str
    path: str
    query: bytes
    headers: list[Header]
    body: bytes
    forward_authorization: bool
    identity: bool = False
    rollout_id: str = ""

    def with_body(self, body: bytes) -> Request:
        return replace(self, body=body)


class _Protocol(ResponseHandler):
    """Wakes whoever reads a body when its connection ends; after a chunk that is none aiohttp lets them wait."""

    def connection_lost(self, exc: BaseException | None) -> None:
        payload = self._payload
        super().connection_lost(exc)
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("its answer is malformed"))


def make_session() -> aiohttp.ClientSession:
    """A session for passthrough: no limit on connections, no cookies, no headers of its own, bodies as they are."""
    # vLLM's server closes idle connections after 5 s; a request must not meet one that is just being closed.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4, ttl_dns_cache=60)
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


class NoConnection(UpstreamUnreachable):
    """The request did not reach the upstream."""


class NoConnectionInTime(UpstreamTimeout, NoConnection):
    """Nor was it refused."""


class HttpUpstream:
    """Servers that speak the agents' protocol: one, or replicas among which a rollout keeps to its own."""

    def __init__(self, config: UpstreamConfig, session: aiohttp.ClientSession, health: Health) -> None:
        self._config = config
        self._session = session
        self._health = health

    async def open(self, request: Request) -> HttpAnswer:
        """Send the request; where there is no connection, to the rollout's next replica."""
        *others, last = self._health.order(self._config, request.rollout_id)
        for url in others:
            try:
                return HttpAnswer(self._config, await _open(self._session, self._config, url, request))
            except NoConnection as error:
                log.warning("%s; the next replica is tried", error.message)
        return HttpAnswer(self._config, await _open(self._session, self._config, last, request))

    async def close(self) -> None:
        """The session is its opener's."""


class HttpAnswer:
    """An answer whose headers are there and whose body is on its way."""

    def __init__(self, config: UpstreamConfig, response: aiohttp.ClientResponse) -> None:
        self._config = config
        self._response = response
        self.status = response.status
        self.is_stream = response.status == 200 and response.content_type == "text/event-stream"
        self.release = response.release

    @property
    def retry_after(self) -> str:
        return self._response.headers.get("Retry-After", "")

    def headers(self, *, keep_length: bool) -> list[Header]:
        return response_headers(self._config, self._response, keep_length=keep_length)

    def chunks(self) -> AsyncIterator[bytes]:
        return read_chunks(self._config, self._response)


async def _open(
    session: aiohttp.ClientSession, upstream: UpstreamConfig, base_url: str, request: Request
) -> aiohttp.ClientResponse:
    try:
        async with asyncio.timeout(upstream.first_byte_timeout_s):
            response = await session.request(
                request.method,
                _url(base_url, request),
                headers=_request_headers(upstream, request),
                data=request.body or None,
                allow_redirects=False,
                auto_decompress=request.identity,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=upstream.connect_timeout_s),
            )
    except aiohttp.ConnectionTimeoutError:
        raise NoConnectionInTime(
            f"upstream {upstream.name}: no connection within {upstream.connect_timeout_s} s"
        ) from None
    except TimeoutError:
        raise UpstreamTimeout(f"upstream {upstream.name}: no answer within {upstream.first_byte_timeout_s} s") from None
    except aiohttp.ClientConnectorError as error:
        reason = error.os_error.strerror or type(error.os_error).__name__
        raise NoConnection(f"upstream {upstream.name} cannot be reached: {reason}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamUnreachable(f"upstream {upstream.name} broke off: {_describe(upstream, error)}") from None
    if response.connection is not None and (protocol := response.connection.protocol) is not None:
        protocol.read_timeout = upstream.idle_timeout_s
        protocol.start_timeout()
    return response


async def read_chunks(upstream: UpstreamConfig, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The answer's body as it arrives. Raises UpstreamUnreachable if it breaks off, UpstreamTimeout if it stalls."""
    mask = _key_mask(upstream)
    while True:
        try:
            data = await response.content.readany()
        except TimeoutError:
            raise UpstreamTimeout(f"upstream {upstream.name}: nothing for {upstream.idle_timeout_s} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamUnreachable(f"upstream {upstream.name} broke off: {_describe(upstream, error)}") from None
        if not data:
            break
        yield data if mask is None else mask.feed(data)
    if mask is not None:
        yield mask.end()


def response_headers(upstream: UpstreamConfig, response: aiohttp.ClientResponse, *, keep_length: bool) -> list[Header]:
    """The upstream's headers without those of the connection.

    Without `keep_length` also without those of a body that may change: its length, and an encoding that was undone.
    """
    dropped = _HOP_BY_HOP | _named_by_connection(response.raw_headers)
    if not keep_length:
        dropped |= {b"content-length"} | ({b"content-encoding"} if _is_decoded(response) else frozenset())
    kept = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in dropped]
    mask = _key_mask(upstream)
    return kept if mask is None else [(name, mask.once(value)) for name, value in kept]


def _is_decoded(response: aiohttp.ClientResponse) -> bool:
    return response.headers.get("Content-Encoding", "").lower().encode() in _DECODED


def _request_headers(upstream: UpstreamConfig, request: Request) -> list[tuple[str, str]]:
    dropped = _HOP_BY_HOP | _OUR_REQUEST_HEADERS | _named_by_connection(request.headers)
    if upstream.api_key or not request.forward_authorization:
        dropped |= _CREDENTIALS
    identity = request.identity or upstream.api_key is not None  # compressed, the key could not be found
    if identity:
        dropped |= {b"accept-encoding"}
    kept = [(_text(name), _text(value)) for name, value in request.headers if name.lower() not in dropped]
    kept += upstream.credentials.items()
    if identity:
        kept.append(("accept-encoding", "identity"))
    return kept


def _named_by_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    values = (value for name, value in headers if name.lower() == b"connection")
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def _url(base_url: str, request: Request) -> URL:
    """Quoted anew from the decoded path: what was checked is what is asked for."""
    path = quote(request.path.removeprefix("/v1"), safe="/:@!$&'()*+,;=~")
    query = f"?{quote(request.query, safe=_QUERY_SAFE)}" if request.query else ""
    return URL(base_url + path + query, encoded=True)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _describe(upstream: UpstreamConfig, error: Exception) -> str:
    """aiohttp's errors may be empty, or quote what was received."""
    text, mask = str(error), _key_mask(upstream)
    text = text if mask is None else mask.once(text.encode()).decode()
    return text[:200] or type(error).__name__


def _key_mask(upstream: UpstreamConfig) -> KeyMask | None:
    key = "" if upstream.api_key is None else upstream.api_key.get_secret_value()
    return KeyMask(key) if len(key) >= SHORTEST_KEY else None
