"""POST /v1/messages, Anthropic's API, as a server answers it itself: without token ids. `as_chat/` gets those."""

from __future__ import annotations

from typing import Any

from ..errors import LightningError
from ..json_text import loads
from .chat import message_of_error
from .inject import Injection
from .tokens import Tokens

Json = dict[str, Any]

# https://docs.anthropic.com/en/api/errors
_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 415: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip


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

    whole = False  # before the last one
    rewrites = False

    usual = None

    def __init__(self, api: MessagesApi) -> None:
        self.tokens = Tokens()
        self.error: str | None = None
        self.finished = False
        self._api = api
        self._message: Json | None = None
        self._blocks: dict[int, Json] = {}
        self._json: dict[int, str] = {}

    def feed(self, raw: bytes, event: Json) -> bytes:
        kind, index = event.get("type"), event.get("index")
        self.finished = kind in ("message_stop", "error")
        if kind == "error":
            self.error = message_of_error(event.get("error"))
        elif kind == "message_start" and isinstance(message := event.get("message"), dict):
            self._message = dict(message)
        elif kind == "message_delta":
            self._feed_message_delta(event)
        elif isinstance(index, int):
            self._feed_block(index, kind, event)
        if self.finished and self._message is not None:
            self.tokens = self._api.tokens(self._message)
        return raw

    def flush(self) -> bytes:
        return b""

    def last(self, raw: bytes) -> bytes:
        return raw

    def response(self) -> Any:
        if self._message is None:
            return None
        return self._message | {"content": [self._block(index) for index in sorted(self._blocks)]}

    def _feed_message_delta(self, event: Json) -> None:
        if self._message is not None:
            self._message |= _object(event.get("delta"))
            self._message["usage"] = _object(self._message.get("usage")) | _object(event.get("usage"))

    def _feed_block(self, index: int, kind: Any, event: Json) -> None:
        if kind == "content_block_start" and isinstance(block := event.get("content_block"), dict):
            self._blocks[index] = dict(block)
        delta = event.get("delta")
        if kind != "content_block_delta" or not isinstance(delta, dict) or index not in self._blocks:
            return
        block = self._blocks[index]
        for name, value in delta.items():
            if name == "partial_json" and isinstance(value, str):
                self._json[index] = self._json.get(index, "") + value
            elif name == "citation":
                before = block.get("citations")
                block["citations"] = [*(before if isinstance(before, list) else ()), value]
            elif name != "type":
                old = block.get(name)
                block[name] = old + value if isinstance(old, str) and isinstance(value, str) else value

    def _block(self, index: int) -> Json:
        """A content block as it is without streaming. A tool's input comes in pieces of JSON."""
        text = self._json.get(index)
        if not text:
            return self._blocks[index]
        try:
            return self._blocks[index] | {"input": loads(text)}
        except ValueError:
            return self._blocks[index] | {"input": text}


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}
