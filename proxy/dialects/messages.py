"""Reads the answers of /v1/messages, Anthropic's API, as a server's own route gives them: without token ids."""

from __future__ import annotations

from typing import Any

from ...core.errors import LightningError
from ...core.json_text import loads
from ...core.sse import event_name
from ...core.tokens import Tokens
from ...core.values import error_in, message_of_error, number
from .assemble import AnswerParts, joined, put
from .stream import Dialect, Injection, Transcript

Json = dict[str, Any]

# https://docs.anthropic.com/en/api/errors
_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 415: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip
# By what a delta adds: the block that it belongs to, as at its start.
_EMPTY: dict[str, Json] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": ""},
    "signature": {"type": "thinking", "thinking": ""},
    "partial_json": {"type": "tool_use", "input": {}},
    "citation": {"type": "text", "text": ""},
}


class MessagesApi(Dialect):
    def tokens(self, body: Json) -> Tokens:
        choice = {"index": 0, "finish_reason": body.get("stop_reason")}
        return Tokens({"choices": [choice], "usage": body.get("usage")})

    def stream(self, injection: Injection) -> MessagesStream:
        return MessagesStream()

    def error_body(self, error: LightningError) -> Json:
        kind = _ERROR_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesStream(Transcript):
    """A stream of message_start, blocks (start, deltas, stop), message_delta and message_stop.

    Some servers give several blocks the same index, or omit the starts of blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped = False
        self._message: Json | None = None
        self._blocks = AnswerParts[Json]()

    @property
    def tokens(self) -> Tokens:
        return MessagesApi().tokens(self._message or {})

    @property
    def complete(self) -> bool:
        """Return whether a message_delta with a stop reason came: some servers send nothing after it."""
        return self._stopped

    def take(self, raw: bytes, event: Json) -> bytes:
        kind, index = str(event.get("type") or event_name(raw)), number(event.get("index"))
        match kind:
            case "message_start":
                self._message = dict(_object(event.get("message")))
            case "message_delta":
                self._feed_message_delta(event)
            case "content_block_start":
                block, before = _object(event.get("content_block")), self._blocks.get(index)
                if before is None or not block.get("id") or before.get("id") != block["id"]:
                    self._blocks.open(index, dict(block))
            case "content_block_delta":
                self._feed_block_delta(index, _object(event.get("delta")))
            case "content_block_stop" | "message_stop" | "ping":
                pass
            case _ if (error := error_in(raw, event)) is not None:
                self.failure = message_of_error(error)
        self.finished = kind == "message_stop" or self.failure is not None
        return raw

    def response(self) -> Any:
        blocks = [_as_whole(block) for block in self._blocks]
        if self._message is None:
            return {"type": "message", "role": "assistant", "content": blocks} if blocks else None
        return self._message | ({"content": blocks} if blocks or not self._message.get("content") else {})

    def _feed_message_delta(self, event: Json) -> None:
        message = self._message = self._message or {"type": "message", "role": "assistant"}
        for name, value in _object(event.get("delta")).items():
            put(message, name, value)
        self._stopped = bool(message.get("stop_reason"))
        before, usage = _object(message.get("usage")), _object(event.get("usage"))
        # Counts only grow: some servers send 0 for counts that they sent before.
        message["usage"] = before | {name: n for name, n in usage.items() if n or not before.get(name)}

    def _feed_block_delta(self, index: int | None, delta: Json) -> None:
        """Add a delta to its block. Open the block if it was not started."""
        block = self._blocks.get(index)
        empty = next((empty for name, empty in _EMPTY.items() if delta.get(name) is not None), {})
        is_other = empty and block and block.get("type") in ("text", "thinking", "tool_use")
        if block is None or (is_other and block["type"] != empty["type"]):
            block = self._blocks.open(index, dict(empty))
        added = {name: value for name, value in delta.items() if name not in ("type", "citation") and value is not None}
        joined(block, added | ({"citations": [delta["citation"]]} if "citation" in delta else {}), "")


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _as_whole(block: Json) -> Json:
    """The block in its non-streamed form. A tool's input is parsed, but remains text if it was cut off."""
    whole = {name: value for name, value in block.items() if name != "partial_json"}
    if given := block.get("partial_json"):
        try:
            value = loads(given) if isinstance(given, str) else given
        except ValueError:
            value = given
        whole["input"] = given if isinstance(value, str) else value
    return whole
