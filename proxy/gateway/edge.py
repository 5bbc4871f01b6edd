"""The first to see a client's bytes: uvicorn's HTTP/1.1, and what it leaves open.

What two parsers might read differently (two lengths, a bare line feed, …) is refused by llhttp. Added here: limits on
the size and the time of a request's head; trailers, which are no headers; and upgrades, which are ignored.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 65_536
HEAD_S = 30.0


class _HeadTooLarge(Exception):
    pass


class EdgeProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=EdgeProtocol)`."""

    _between = True  # no request has begun that has not ended
    _in_head = False
    _head_bytes = 0  # of the fields that are whole
    _raw_bytes = 0  # all that came while the head had not ended
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        in_body = not (self._in_head or self._between)  # of the request before: some of these bytes are its
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(too_large=isinstance(error.__context__, _HeadTooLarge))
        else:
            if self._in_head:
                self._start_head_timer()
                self._raw_bytes += 0 if in_body else len(data)
                if self._raw_bytes > HEAD_BYTES:
                    self._refuse(too_large=True)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._between, self._in_head, self._head_bytes, self._raw_bytes = False, True, 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: it comes when what the headers say has been decided
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES:
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._between = True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request once more, as one that asks for no upgrade: the parser takes its body for another protocol.

        Some clients ask for HTTP/2 with every request.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse()
            return
        head = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() != b"upgrade"]
                head += [b"connection: " + b",".join(kept)] if kept else []
            elif name != b"upgrade":
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    def _refuse(self, *, too_large: bool = False) -> None:
        """Answer and close: where the next request begins is not known."""
        self._stop_head_timer()
        if self.pipeline or (
            self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        ):
            self.transport.close()  # an answer is on its way: nothing may come into the middle of it
            return
        status, text = b"400 Bad Request", b"this is no valid HTTP request"
        if too_large:
            status = b"431 Request Header Fields Too Large"
            text = b"the request's target and headers are larger than %d bytes" % HEAD_BYTES
        body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % text
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
