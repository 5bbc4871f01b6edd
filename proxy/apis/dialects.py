"""Defines the recorded APIs and their differences: fields to add, fields to take out, and the end of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ..errors import LightningError
from .chat import ChatApi
from .inject import Injection
from .messages import MessagesApi
from .responses import ResponsesApi
from .tokens import Tokens

Json = dict[str, Any]


class Stream(Protocol):
    """The events of one streamed answer, in order."""

    tokens: Tokens
    error: str | None

    @property
    def finished(self) -> bool:
        """Return whether the last event that was fed in was the answer's last event."""

    @property
    def whole(self) -> bool:
        """Return whether the answer is complete although the stream's last event is missing."""

    def feed(self, raw: bytes, event: Json) -> bytes:
        """Return the bytes to send for an event. Bytes without injected fields pass unchanged."""

    def flush(self) -> bytes:
        """Return the bytes held back so far, for a stream that goes on or ends differently."""

    def response(self) -> Any:
        """Return the answer so far, in the shape that it has without streaming; None before the first event."""


class Dialect(Protocol):
    """Handles the special features of one API."""

    def inject(self, body: Json) -> tuple[Json, Injection]:
        """Return the request for a vLLM upstream, and the fields that were added to it."""

    def clean(self, body: Json, injection: Injection) -> bool:
        """Remove, in place, what only the proxy asked for from a whole answer; return whether there was any."""

    def tokens(self, body: Json) -> Tokens:
        """Return the tokens that a whole answer reports. Call it before the answer is cleaned."""

    def stream(self, injection: Injection) -> Stream: ...

    def error_body(self, error: LightningError) -> Json:
        """Return one of our errors in the API's own shape."""


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "/v1/chat/completions": ChatApi("chat"),
        "/v1/completions": ChatApi("completions"),
        "/v1/responses": ResponsesApi(),
        "/v1/messages": MessagesApi(),
    }
)
