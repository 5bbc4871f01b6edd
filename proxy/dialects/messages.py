"""POST /v1/messages, Anthropic's API, as a server answers it itself: without token ids. `as_chat/` gets those."""

from __future__ import annotations

from typing import Any

from ...core.errors import LightningError
from ...core.json_text import loads
from ...core.sse import event_name
from ...core.tokens import Tokens
from ...core.values import Places, error_in, message_of_error, number, put
from .chat import Injection

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

# By what a delta adds: the block that it belongs to, as it is at its start.
_EMPTY: dict[str, Json] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": ""},
    "signature": {"type": "thinking", "thinking": ""},
    "partial_json": {"type": "tool_use", "input": {}},
    "citation": {"type": "text", "text": ""},
}


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


class Blocks:
    """The blocks of one message. Some servers give several of them one index, or leave out their starts."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._places = Places()
        self._at: dict[int | None, _Block] = {}  # by index: the block that came there last

    def start(self, index: Any, block: Json) -> None:
        place = number(index)
        before = self._at.get(place)
        if before is None or not block.get("id") or before.fields.get("id") != block["id"]:
            self._open(place, block)

    def add(self, index: Any, delta: Json) -> None:
        """Join a delta to its block, which is opened if it was not started."""
        place = number(index)
        kind = next((empty for name, empty in _EMPTY.items() if delta.get(name) is not None), None)
        block = self._at.get(place)
        if block is None or (kind is not None and block.is_other(kind["type"])):
            block = self._open(place, kind or {})
        block.add(delta)

    def result(self) -> list[Json]:
        """Return the blocks in order."""
        return [block.result() for block in sorted(self._blocks, key=lambda block: block.place)]

    def _open(self, index: int | None, block: Json) -> _Block:
        opened = _Block(self._places.take(index), block)
        self._blocks.append(opened)
        self._at[index] = self._at[None] = opened
        return opened


class _Block:
    def __init__(self, place: int, fields: Json) -> None:
        self.place = place
        self.fields = dict(fields)
        self._json: list[str] = []

    def is_other(self, kind: str) -> bool:
        """Return whether no delta of a block of this kind can belong to it."""
        return self.fields.get("type") in ("text", "thinking", "tool_use") and self.fields["type"] != kind

    def add(self, delta: Json) -> None:
        for name, value in delta.items():
            old = self.fields.get(name)
            if name == "partial_json":
                self._add_input(value)
            elif name == "citation":
                before = self.fields.get("citations")
                self.fields["citations"] = [*(before if isinstance(before, list) else ()), value]
            elif name != "type":
                self.fields[name] = old + value if isinstance(old, str) and isinstance(value, str) else value

    def result(self) -> Json:
        """Return the block as it is without streaming. A tool's input comes in pieces of JSON, which may be cut."""
        text = "".join(self._json)
        if not text:
            return self.fields
        try:
            value = loads(text)
        except ValueError:
            value = text
        return self.fields | {"input": text if isinstance(value, str) else value}

    def _add_input(self, value: Any) -> None:
        if isinstance(value, str):
            self._json.append(value)
        elif isinstance(value, dict):
            self.fields["input"] = value
