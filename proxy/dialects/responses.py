"""POST /v1/responses, as a server answers it itself: without the tokens of all its text. `as_chat/` gets those."""

from __future__ import annotations

from typing import Any

from ...core.errors import LightningError
from ...core.sse import event_name
from ...core.tokens import Tokens
from ...core.tools import dicts, is_call
from ...core.values import error_in, message_of_error
from .inject import Injection
from .response_items import ResponseItems, filled

Json = dict[str, Any]

# The last event, in all spellings that are in use, and the response's status by it.
_LAST = {
    "response.completed": "completed", "response.done": "completed", "response.incomplete": "incomplete",
    "response.failed": "failed", "response.cancelled": "cancelled", "response.canceled": "cancelled",
}  # fmt: skip


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
    """A stream of events that each say their `type`; the last one holds the full response, or should."""

    complete = False  # before the last one
    rewrites = False

    usual = None

    def __init__(self, api: ResponsesApi) -> None:
        self.error: str | None = None
        self.finished = False
        self._api = api
        self._response: Json | None = None
        self._items = ResponseItems()

    @property
    def tokens(self) -> Tokens:
        return self._api.tokens(self.response() or {})

    def feed(self, raw: bytes, event: Json) -> bytes:
        response = event if event.get("object") == "response" else event.get("response")
        response = response if isinstance(response, dict) else {}
        kind = str(event.get("type") or event_name(raw) or f"response.{response.get('status')}")
        self._items.feed(kind, event)
        if response:
            response = dict(response)
            for name, value in (self._response or {}).items():
                response[name] = response.get(name) or value
            self._response = response
        error = None if kind.startswith("response.") and not _is_bare(event) else error_in(raw, event)
        self.finished = kind in _LAST or error is not None
        if error is not None:
            self.error = message_of_error(error)
        elif self.finished:
            self._finish(_LAST[kind], event)
        return raw

    def flush(self) -> bytes:
        return b""

    def last(self, raw: bytes) -> bytes:
        return raw

    def response(self) -> Any:
        """Return the newest response that was sent, with items added that only other events had."""
        items = self._items.result()
        if self._response is None:
            return {"object": "response", "output": items} if items else None
        output = self._response.get("output")
        if isinstance(output, list) and output:
            items = filled(output, items) if list(map(_type, output)) == list(map(_type, items)) else output
        return self._response | {"output": items}

    def _finish(self, status: str, event: Json) -> None:
        response = self._response = self._response or {"object": "response"}
        if response.get("status") in (None, "", "in_progress", "queued"):
            response["status"] = status
        if not response.get("usage") and isinstance(usage := event.get("usage"), dict):
            response["usage"] = usage
        if error := response.get("error") or event.get("error"):
            self.error = message_of_error(error)
        elif response["status"] in ("failed", "cancelled", "canceled"):
            self.error = f"the upstream says that the response is {response['status']}"


def _is_bare(event: Json) -> bool:
    """Whether an event has neither a type nor a response."""
    return not event.get("type") and not isinstance(event.get("response"), dict)


def _type(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else None


def _finish_reason(response: Json) -> str | None:
    details = response.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        return "length"
    if any(map(is_call, dicts(response.get("output")))):
        return "tool_calls"
    return "stop" if response.get("status") == "completed" else None
