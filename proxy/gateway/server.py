"""Changes how uvicorn handles HTTP/1, marks unfinished answers when the server stops, and limits connections.

Trailers are dropped: they come after the headers have been acted on. WebSockets are refused. Other upgrades are
ignored, because some clients ask for HTTP/2 with every request. Each connection uses an open file, and each call one
more, so the number of connections without a request is limited.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import resource
import socket
import struct
from contextlib import suppress
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent

from ...core.errors import InvalidRequest, LightningError, Overloaded, RequestTimeout, UpgradeRequired
from .asgi import SLOW_BYTES, SLOW_S, Loan, Memory

log = logging.getLogger(__name__)

HEAD_S = 10.0  # that a request's head may take
UNTAKEN_S = 60.0  # in which a client has to read a part of its answer
UNTAKEN_WITHOUT_KEY = 2**26  # bytes of answers that clients without a key leave unread, in total
WITHOUT_KEY_S = 1.0  # for which a request without a key keeps its place when there is no other
_PROBE_PATHS = (b"/healthz", b"/readyz", b"/metrics")
OWN_FILES = 64  # of the process: store, log, threads' pipes, connections of our own to model servers
FILES_OF_A_CALL = 2
LEAST_SILENT = 1 / 16  # of the files are for connections that have sent no head yet
MOST_SILENT = 2048  # connections without a request; each takes memory, too
PROBES = 8  # requests for the proxy's health that are accepted in addition to all calls
MOST_FILES = 2**20  # where the system has no limit
LOG_EVERY_S = 60.0
MOST_JOINED = 2**14  # bytes of an answer that wait for the end of a turn of the event loop


def raise_limit() -> None:
    """Let this process and its children open as many files as the system allows, at most `MOST_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft not in (hard, resource.RLIM_INFINITY) and soft < wanted:
        with suppress(ValueError, OSError):  # then it stays unchanged, which the start says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def files_allowed() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)


def calls_at_once(files: int) -> int:
    """Return how many calls can run at once with this limit of open files."""
    return max(int((files - OWN_FILES) * (1 - LEAST_SILENT)) // FILES_OF_A_CALL, 1)


class Connections:
    """Limits connections: closes the oldest ones without a request if there are too many.

    If there is no room for a new call, it takes the place of a call without a key whose answer is slow or unread.
    """

    def __init__(self, files: int) -> None:
        self._calls, self._room, self._logged_at = calls_at_once(files), files - OWN_FILES, -LOG_EVERY_S
        # Connections that have not sent a request yet, that may bring another one, and that have one under way.
        self.new, self.idle, self.at_work = self._all = tuple(dict[ServerProtocol, None]() for _ in range(3))
        self.without_key = Memory(UNTAKEN_WITHOUT_KEY, UNTAKEN_WITHOUT_KEY)  # for answers that clients do not read

    def began(self, connection: ServerProtocol, *, is_probe: bool) -> bool:
        """Note that a request's head has arrived. Return False if there is no room for another call."""
        if connection not in self.at_work and len(self.at_work) >= self._calls + is_probe * PROBES:
            idle = next((one for one in self.at_work if one.is_slow_without_key), None)
            self.lost(idle or connection)
            if idle is None:
                return False
            idle.transport.abort()
        self.move(connection, self.at_work)
        return True

    def lost(self, connection: ServerProtocol) -> None:
        for connections in self._all:
            connections.pop(connection, None)

    def move(self, connection: ServerProtocol, to: dict[ServerProtocol, None]) -> None:
        """Note a connection's state, and close surplus connections that have no request."""
        self.lost(connection)
        to[connection] = None
        allowed = max(min(self._room // 4, MOST_SILENT, self._room - FILES_OF_A_CALL * len(self.at_work)), 1)
        while len(self.new) + len(self.idle) > allowed:
            oldest = next(iter(self.new or self.idle))
            self.lost(oldest)
            oldest.close_silent()
            if monotonic() > self._logged_at + LOG_EVERY_S:
                log.warning("closing connections without a request: at most %d of them may be open now", allowed)
                self._logged_at = monotonic()


def _refusal(error: LightningError) -> bytes:
    """Return the complete answer that refuses a request and closes the connection."""
    body = json.dumps(error.body()).encode()
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [b"%s: %s" % header for header in dict([*error.headers, (b"connection", b"close")]).items()]
    lines += [b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_REFUSAL = _refusal(InvalidRequest("the HTTP request is malformed or has the method CONNECT"))
_NO_SOCKETS = _refusal(UpgradeRequired("WebSockets are not forwarded: use HTTP"))
_LATE = _refusal(RequestTimeout(f"the request's headers did not arrive within {HEAD_S:g} s"))
_FULL = _refusal(Overloaded("too many calls: the limit of open files is reached"))

_CONNECTIONS, _STOPPING = "lightning_proxy.connections", "lightning_proxy.stopping"


def is_stopping(scope: Scope) -> bool:
    """Return whether the server is stopping and waits for this answer to end."""
    return _STOPPING in scope


class _Joining:
    """A transport that joins what is written within one turn of the event loop, such as an answer's head and body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._waiting = transport, loop, list[bytes]()

    def write(self, data: bytes) -> None:
        self._waiting.append(data)
        if len(data) > MOST_JOINED:
            self._flush()
        elif len(self._waiting) == 1:
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and not self._transport.is_closing():
            self._transport.write(b"".join(waiting))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Cycle(RequestResponseCycle):
    """A request and its answer. An unfinished HTTP/1.0 answer ends with a reset, so that it does not look complete."""

    _has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and self.scope["http_version"] == "1.0":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
        if not self._has_length:
            body = message.get("body", b"")
            self.chunked_encoding, self.expected_content_length = False, len(body) if isinstance(body, bytes) else 0
        await super().send(message)

    async def run_asgi(self, app: ASGI3Application) -> None:
        await super().run_asgi(app)
        is_plain = self.scope["http_version"] == "1.0" and not self.response_complete
        if is_plain and (connection := self.transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class ServerProtocol(HttpToolsProtocol):
    """The proxy's HTTP protocol for uvicorn: `uvicorn.Config(http=ServerProtocol)`."""

    _in_head = False
    _at_work = False  # from a request's head to the end of its answer
    _requested_at = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    _untaken_timer: asyncio.TimerHandle | None = None
    _loan: Loan  # of the answer that the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Joining(transport, self.loop))  # type: ignore[arg-type]
        of_server = vars(self.server_state)
        if _CONNECTIONS not in of_server:
            of_server[_CONNECTIONS] = Connections(files_allowed())
        self._others: Connections = of_server[_CONNECTIONS]
        self._others.move(self, self._others.new)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.lost(self)
        self._head_came()
        self._taken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse()
        if not self._at_work:
            self._await_head()  # a part of the next head, or bytes to ignore

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade() or self.transport.is_closing():
            return
        self._head_came()
        if not self._others.began(self, is_probe=self.url.startswith(_PROBE_PATHS)):
            self._refuse(_FULL)
            return
        self._at_work, self._requested_at = True, self.loop.time()
        super().on_headers_complete()
        self.headers = []  # for trailers, which nobody reads

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        cycle.__class__ = _Cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if self._at_work:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._at_work and not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        more = bool(self.pipeline)
        super().on_response_complete()
        if more:
            return
        self._at_work = False
        if not self.transport.is_closing():
            self._others.move(self, self._others.idle)
            if self._in_head:
                self._await_head()

    def shutdown(self) -> None:
        if self.cycle is not None:
            scope: Scope = self.cycle.scope  # type: ignore[assignment]  # uvicorn's has a fixed set of keys
            scope[_STOPPING] = True
        super().shutdown()

    def close_silent(self) -> None:
        """Close this connection, which has no request under way."""
        self.transport.close()
        if self.transport.get_write_buffer_size():  # the end of an answer is still to go
            self.loop.call_later(HEAD_S, self.transport.abort)

    def _await_head(self) -> None:
        def late() -> None:
            if self._in_head:
                self.transport.write(_LATE)
            self.transport.close()

        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        try:
            self._loan = self._state.get("loan") or self._others.without_key.loan(None)
        except Overloaded:
            self.loop.call_soon(self.transport.abort)  # not in the middle of a write
        else:
            self._wait_until_taken()

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def _wait_until_taken(self, before: float = math.inf) -> None:
        """Abort the connection once the client reads too slowly. `before`: its unread bytes at the last check."""
        size = self.transport.get_write_buffer_size()
        if size > before - SLOW_BYTES * UNTAKEN_S / SLOW_S:
            self.transport.abort()
            return
        self._loan.not_taken(size)
        self._untaken_timer = self.loop.call_later(UNTAKEN_S, self._wait_until_taken, size)

    def _taken(self) -> None:
        if self._untaken_timer is not None:
            self._untaken_timer.cancel()
            self._untaken_timer = None
            self._loan.not_taken(0)

    @property
    def _state(self) -> dict[str, Any]:
        return {} if self.cycle is None else self.cycle.scope["state"]

    @property
    def is_slow_without_key(self) -> bool:
        """Return whether the request had no key and its answer is unread or slow."""
        waits = self.transport.get_write_buffer_size() > 0 or self.loop.time() > self._requested_at + WITHOUT_KEY_S
        return waits and "caller" not in self._state

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Refuse WebSockets and CONNECT; parse any other request again, without its upgrade headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse()
            return
        if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in self.headers):
            self._refuse(_NO_SOCKETS)
            return
        head = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token for token in value.split(b",") if token.strip().lower() != b"upgrade")
                head.append(b"connection: " + b",".join(tokens))
            elif name != b"upgrade":
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    def _refuse(self, refusal: bytes = _REFUSAL) -> None:
        """Send the refusal, unless another answer is under way, and close the connection."""
        under_way = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not (self.pipeline or under_way):  # nothing may come into the middle of an answer
            self.transport.write(refusal)
        self.transport.close()
