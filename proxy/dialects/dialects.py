"""Defines the recorded APIs and their differences: fields to add, fields to take out, and the end of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ...core.errors import LightningError
from ...core.tokens import Tokens
from .chat import ChatApi, Injection, UsualChunks
from .messages import MessagesApi
from .responses import ResponsesApi

Json = dict[str, Any]


class Stream(Protocol):
    """The events of one streamed answer, in order."""

    @property
    def usual(self) -> UsualChunks | None:
        """Return the object that passes on events without parsing them; None where all are parsed."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def error(self) -> str | None: ...

    @property
    def rewrites(self) -> bool:
        """Return whether the agent gets other bytes than the upstream sent."""

    @property
    def finished(self) -> bool:
        """Return whether the last event that was fed in was the answer's last event."""

    @property
    def complete(self) -> bool:
        """Return whether the answer is complete although the stream's last event is missing."""

    def feed(self, raw: bytes, event: Json) -> bytes:
        """Return the bytes to send for an event. Bytes without injected fields pass unchanged."""

    def flush(self) -> bytes:
        """Return the bytes held back so far, for a stream that continues or ends differently."""

    def last(self, raw: bytes) -> bytes:
        """Return the agent's last bytes where the upstream's are `raw`, its [DONE]; empty where that is missing."""

    def response(self) -> Any:
        """Return the answer so far, in the shape that it has without streaming; None before the first event."""


class Dialect(Protocol):
    """Handles the special features of one API."""

    def inject(self, body: Json) -> tuple[Json, Injection]:
        """Return the request for a vLLM upstream, and the fields that were added to it."""

    def agents(self, body: Json, injection: Injection) -> Json | None:
        """Return a non-streamed answer as the agent gets it; None if that is the answer's own bytes."""

    def refusal(self, body: Json, status: int) -> Json | None:
        """Return the upstream's error as the agent gets it; None if that is the error's own bytes."""

    def tokens(self, body: Json) -> Tokens:
        """Return the tokens that a non-streamed answer reports. Call it before `agents`, which may change it."""

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
