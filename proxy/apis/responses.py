"""POST /v1/responses, as a server answers it itself: without the tokens of all it says. `as_chat/` gets those."""

from __future__ import annotations

from typing import Any

from ..errors import LightningError
from .chat import message_of_error
from .inject import Injection
from .tokens import Tokens
from .tools import dicts, is_call

Json = dict[str, Any]

_LAST = frozenset({"response.completed", "response.failed", "response.incomplete"})


class ResponsesApi:
    def inject(self, body: Json) -> tuple[Json, Injection]:
        return body, Injection()

    def agents(self, body: Json, injection: Injection) -> None:
        return None

    def refusal(self, body: Json, status: int) -> None:
        return None

    def tokens(self, body: Json) -> Tokens:
        tokens = Tokens()
        choice = {"index": 0, "finish_reason": _finish_reason(body)}
        tokens.add({"choices": [choice], "usage": body.get("usage")})
        return tokens

    def stream(self, injection: Injection) -> ResponsesStream:
        return ResponsesStream(self)

    def error_body(self, error: LightningError) -> Json:
        return error.body()


class ResponsesStream:
    """A stream of events that each say their `type`; the last one holds the whole response."""

    whole = False  # before the last one
    rewrites = False

    usual = None

    def __init__(self, api: ResponsesApi) -> None:
        self.tokens = Tokens()
        self.error: str | None = None
        self.finished = False
        self._api = api
        self._response: Json | None = None
        self._items: dict[int, Any] = {}

    def feed(self, raw: bytes, event: Json) -> bytes:
        kind = str(event.get("type"))
        self.finished = kind in _LAST or kind == "error"
        if self.finished:
            self._finish(event)
        if isinstance(response := event.get("response"), dict):
            self._response = response
        if kind == "response.output_item.done" and isinstance(index := event.get("output_index"), int):
            self._items[index] = event.get("item")
        return raw

    def flush(self) -> bytes:
        return b""

    def last(self, raw: bytes) -> bytes:
        return raw

    def response(self) -> Any:
        """Return the last event's response; after a break, the first event's with the items that were whole."""
        if self._response is None or self.finished:
            return self._response
        return self._response | {"output": [self._items[index] for index in sorted(self._items)]}

    def _finish(self, event: Json) -> None:
        response = event.get("response")
        if isinstance(response, dict):
            self.tokens = self._api.tokens(response)
            if response.get("error"):
                self.error = message_of_error(response["error"])
        if event.get("type") == "error":
            self.error = message_of_error(event.get("error", event))


def _finish_reason(response: Json) -> str | None:
    details = response.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        return "length"
    if any(map(is_call, dicts(response.get("output")))):
        return "tool_calls"
    return "stop" if response.get("status") == "completed" else None
