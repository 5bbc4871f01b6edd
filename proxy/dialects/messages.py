"""POST /v1/messages, Anthropic's API, as a server answers it itself: without token ids. `as_chat/` gets those."""

from __future__ import annotations

from typing import Any

from ...core.errors import LightningError
from ...core.sse import event_name
from ...core.tokens import Tokens
from ...core.values import error_in, message_of_error, put
from .inject import Injection
from .message_blocks import Blocks

Json = dict[str, Any]

# https://docs.anthropic.com/en/api/errors
_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 415: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip
_KINDS = frozenset({
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
    "message_stop", "ping",
})  # fmt: skip


class MessagesApi:
    def inject(self, body: Json) -> tuple[Json, Injection]:
        return body, Injection()

    def agents(self, body: Json, injection: Injection) -> None:
        return None

    def refusal(self, body: Json, status: int) -> None:
        return None

    def tokens(self, body: Json) -> Tokens:
        tokens = Tokens()
        tokens.add({"choices": [{"index": 0, "finish_reason": body.get("stop_reason")}], "usage": body.get("usage")})
        return tokens

    def stream(self, injection: Injection) -> MessagesStream:
        return MessagesStream(self)

    def error_body(self, error: LightningError) -> Json:
        kind = _ERROR_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesStream:
    """A stream of message_start, blocks (start, deltas, stop), message_delta and message_stop."""

    rewrites = False

    usual = None

    def __init__(self, api: MessagesApi) -> None:
        self.error: str | None = None
        self.finished = False
        self._api = api
        self.complete = False  # it has a stop reason: some servers send no more after it
        self._message: Json | None = None
        self._blocks = Blocks()

    @property
    def tokens(self) -> Tokens:
        return self._api.tokens(self._message or {})

    def feed(self, raw: bytes, event: Json) -> bytes:
        kind = str(event.get("type") or event_name(raw))
        if kind not in _KINDS and (error := error_in(raw, event)) is not None:
            self.error = message_of_error(error)
        elif kind == "message_start":
            self._message = dict(_object(event.get("message")))
        elif kind == "message_delta":
            self._feed_message_delta(event)
        elif kind == "content_block_start":
            self._blocks.start(event.get("index"), _object(event.get("content_block")))
        elif kind == "content_block_delta":
            self._blocks.add(event.get("index"), _object(event.get("delta")))
        self.finished = kind == "message_stop" or self.error is not None
        return raw

    def flush(self) -> bytes:
        return b""

    def last(self, raw: bytes) -> bytes:
        return raw

    def response(self) -> Any:
        blocks = self._blocks.result()
        if self._message is None:
            return {"type": "message", "role": "assistant", "content": blocks} if blocks else None
        return self._message | ({"content": blocks} if blocks or not self._message.get("content") else {})

    def _feed_message_delta(self, event: Json) -> None:
        message = self._message = self._message or {"type": "message", "role": "assistant"}
        for name, value in _object(event.get("delta")).items():
            put(message, name, value)
        self.complete = bool(message.get("stop_reason"))
        before, usage = _object(message.get("usage")), _object(event.get("usage"))
        # Counts only grow: some servers send 0 for counts that they sent before.
        message["usage"] = before | {name: n for name, n in usage.items() if n or not before.get(name)}


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}
