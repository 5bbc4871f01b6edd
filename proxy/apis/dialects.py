"""The APIs whose calls are recorded, and what differs between them: what is added, taken out, and how a stream ends."""

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
        """Whether the event fed last was the answer's last."""

    @property
    def whole(self) -> bool:
        """Whether the answer is all there, though the stream's terminal event is not."""

    def feed(self, raw: bytes, event: Json) -> bytes:
        """The bytes to send for an event; events without anything injected stay the bytes that they were."""

    def flush(self) -> bytes:
        """What was held back, for a stream that goes on or ends differently."""

    def response(self) -> Any:
        """The answer so far, in the shape that it has without streaming; None before the first event."""


class Dialect(Protocol):
    """What is special about one API."""

    def inject(self, body: Json) -> tuple[Json, Injection]:
        """The request for a vLLM upstream, and what was added to it."""

    def clean(self, body: Json, injection: Injection) -> bool:
        """Take out of a whole answer, in place, what only the proxy asked for; whether there was any of it."""

    def tokens(self, body: Json) -> Tokens:
        """What a whole answer says of its tokens, before it is cleaned."""

    def stream(self, injection: Injection) -> Stream: ...

    def error_body(self, error: LightningError) -> Json:
        """An error of ours in the API's own shape."""


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "/v1/chat/completions": ChatApi("chat"),
        "/v1/completions": ChatApi("completions"),
        "/v1/responses": ResponsesApi(),
        "/v1/messages": MessagesApi(),
    }
)
