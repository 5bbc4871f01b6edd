"""Changes three details of the way in which uvicorn reads HTTP/1.1, and tells running answers that the server stops.

Trailers are dropped: they come when what the headers say has been decided. Upgrades are ignored: some clients ask for
HTTP/2 with every request, and uvicorn would lose its body. A WebSocket is a 501. What is no HTTP is refused in OpenAI's
shape. Two lengths, a bare line feed and whatever else two parsers might read differently is refused by llhttp. Limits
on the size and time of a head are for a reverse proxy to set.
"""

from __future__ import annotations

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_BODY = b'{"error":{"message":"this is no valid HTTP request","type":"invalid_request_error","param":null,"code":null}}'
_HEAD = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
_REFUSAL = _HEAD % (b"400 Bad Request", len(_BODY)) + _BODY
_SOCKET = (
    b'{"error":{"message":"WebSockets are not passed on: ask over HTTP","type":"invalid_request_error","param":null,'
    b'"code":null}}'
)
_NO_SOCKETS = _HEAD % (b"501 Not Implemented", len(_SOCKET)) + _SOCKET


_STOPPING = "lightning_proxy.stopping"


def is_stopping(scope: Scope) -> bool:
    """Return whether the server waits for this answer to end, so that it can stop."""
    return _STOPPING in scope


class ServerProtocol(HttpToolsProtocol):
    """The proxy's HTTP protocol for uvicorn: `uvicorn.Config(http=ServerProtocol)`."""

    _in_head = False

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def shutdown(self) -> None:
        if self.cycle is not None:
            scope: Scope = self.cycle.scope  # type: ignore[assignment]  # uvicorn's has a fixed set of keys
            scope[_STOPPING] = True
        super().shutdown()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request once more, without what asks for the upgrade: the parser would leave its body unread."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse()
            return
        if any(name == b"upgrade" and value.lower() == b"websocket" for name, value in self.headers):
            self._refuse(_NO_SOCKETS)
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

    def _refuse(self, refusal: bytes = _REFUSAL) -> None:
        """Answer and close: where the next request begins is not known."""
        under_way = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not (self.pipeline or under_way):  # nothing may come into the middle of an answer
            self.transport.write(refusal)
        self.transport.close()
