"""An upstream as raw passthrough: bytes and headers in and out, its failures as our errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from functools import partial
from urllib.parse import quote

import aiohttp
from aiohttp.client_proto import ResponseHandler
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_random_exponential,
)
from tenacity.wait import wait_base
from yarl import URL

from lightning_proxy.proxy.asgi import Header
from lightning_proxy.proxy.config import UpstreamConfig
from lightning_proxy.proxy.errors import UpstreamTimeout, UpstreamUnreachable
from lightning_proxy.proxy.key_mask import SHORTEST_KEY, KeyMask

# RFC 9110, section 7.6.1, and what is only about the connection to us.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding"
    b" upgrade".split()
)
_OUR_REQUEST_HEADERS = frozenset(
    b"host content-length expect x-rollout-id x-task-id x-agent-name x-rollout-mode x-recording".split()
)
_QUERY_SAFE = "%/:@!$&'()*+,;=~?[]{}|\"<>^`\\"
# Answers that say: not now.
_RETRIED = frozenset({429, 502, 503, 504})
# Of one answer's headers; more are a fault.
MAX_HEADER_BYTES = 256 * 1024
MAX_HEADERS = 1000
# What aiohttp decodes.
_DECODED = frozenset(b"gzip deflate br".split())
_CREDENTIALS = frozenset(b"authorization x-api-key api-key".split())


@dataclass(frozen=True, slots=True)
class Request:
    """What goes upstream. `path`: percent-decoded, from /v1/ on; `headers`: the agent's; `identity`: uncompressed."""

    method: str
    path: str
    query: bytes
    headers: list[Header]
    body: bytes
    forward_authorization: bool
    identity: bool = False

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


async def open_upstream(
    session: aiohttp.ClientSession, upstream: UpstreamConfig, request: Request
) -> aiohttp.ClientResponse:
    """Send the request, as often as `upstream.retries` says, and wait for the answer's headers.

    Raises UpstreamUnreachable, UpstreamTimeout.
    """
    if not upstream.retries:
        return await _open(session, upstream, request)
    retrying = AsyncRetrying(
        stop=stop_after_attempt(1 + upstream.retries),
        wait=_RetryAfter(upstream.retry_wait_s),
        retry=retry_if_result(lambda response: response.status in _RETRIED) | retry_if_exception_type(NoConnection),
        before_sleep=_let_go,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    response: aiohttp.ClientResponse = await retrying(_open, session, upstream, request)
    return response


class NoConnection(UpstreamUnreachable):
    """The request did not reach the upstream."""


class _RetryAfter(wait_base):
    """What the answer's Retry-After says, in seconds or as a date; else 0.5 s, doubling, with jitter."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._else = wait_random_exponential(multiplier=0.5, max=longest)

    def __call__(self, retry_state: RetryCallState) -> float:
        outcome = retry_state.outcome
        value = "" if outcome is None or outcome.failed else outcome.result().headers.get("Retry-After", "")
        if value.isdecimal():
            return min(float(value), self._longest)
        try:
            until = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return self._else(retry_state)
        return min(max(until, 0.0), self._longest)


def _let_go(retry_state: RetryCallState) -> None:
    if retry_state.outcome is not None and not retry_state.outcome.failed:
        retry_state.outcome.result().close()


async def _open(session: aiohttp.ClientSession, upstream: UpstreamConfig, request: Request) -> aiohttp.ClientResponse:
    try:
        response = await session.request(
            request.method,
            _url(upstream, request),
            headers=_request_headers(upstream, request),
            data=request.body or None,
            allow_redirects=False,
            auto_decompress=request.identity,
            timeout=_timeout(upstream),
        )
    except aiohttp.ConnectionTimeoutError:
        raise UpstreamTimeout(
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


def _timeout(upstream: UpstreamConfig) -> aiohttp.ClientTimeout:
    """Until the answer's headers are there; from then on `idle_timeout_s` counts between two reads."""
    return aiohttp.ClientTimeout(
        total=None, sock_connect=upstream.connect_timeout_s, sock_read=upstream.first_byte_timeout_s
    )


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
    if upstream.api_key:
        kept.append(("authorization", f"Bearer {upstream.api_key.get_secret_value()}"))
    if identity:
        kept.append(("accept-encoding", "identity"))
    return kept


def _named_by_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    values = (value for name, value in headers if name.lower() == b"connection")
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def _url(upstream: UpstreamConfig, request: Request) -> URL:
    """Quoted anew from the decoded path: what was checked is what is asked for."""
    path = quote(request.path.removeprefix("/v1"), safe="/:@!$&'()*+,;=~")
    query = f"?{quote(request.query, safe=_QUERY_SAFE)}" if request.query else ""
    return URL(upstream.base_url.rstrip("/") + path + query, encoded=True)


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
