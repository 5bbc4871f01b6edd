"""POST /v1/responses. Field names and the values sent without asking are those of vLLM 0.32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import LightningError
from ..json_text import encode
from .chat import message_of_error
from .inject import Injection
from .tokens import Tokens
from .tools import dicts, is_call

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_LAST = frozenset({"response.completed", "response.failed", "response.incomplete"})


class ResponsesApi:
    """vLLM shows the tokens of a response as its raw messages, and log-probabilities with the parts of its text."""

    def inject(self, body: Json) -> tuple[Json, Injection]:
        include = body.get("include")
        token_ids = body.get("enable_response_messages") in (None, False) and not body.get("background")
        logprobs = include is None or (isinstance(include, list) and LOGPROBS not in include)
        added: Json = {}
        if token_ids:
            added["enable_response_messages"] = True
        if logprobs:
            added["include"] = [*(include or ()), LOGPROBS]
        return body | added, Injection(token_ids, logprobs)

    def clean(self, body: Json, injection: Injection) -> bool:
        names = [n for n in ("input_messages", "output_messages") if injection.token_ids]
        places = [(body, name) for name in names + ["top_logprobs"] * injection.logprobs]
        if injection.logprobs:
            places += [(part, "logprobs") for part in _text_parts(body.get("output"))]
        found = [(part, name) for part, name in places if part.get(name) is not None]
        for part, name in found:
            part[name] = None
        return bool(found)

    def tokens(self, body: Json) -> Tokens:
        tokens = Tokens()
        tokens.add(_as_chat(body))
        return tokens

    def stream(self, injection: Injection) -> ResponsesStream:
        return ResponsesStream(self, injection)

    def error_body(self, error: LightningError) -> Json:
        return error.body()


class ResponsesStream:
    """A stream of events that each say their `type`; the last one holds the whole response."""

    whole = False  # before the last one

    def __init__(self, api: ResponsesApi, injection: Injection) -> None:
        self.tokens = Tokens()
        self.error: str | None = None
        self.finished = False
        self._api = api
        self._injection = injection
        self._response: Json | None = None
        self._items: dict[int, Any] = {}

    def feed(self, raw: bytes, event: Json) -> bytes:
        kind = str(event.get("type"))
        self.finished = kind in _LAST or kind == "error"
        if self.finished:
            self._finish(event)
        changed = self._injection and self._clean(event)
        if isinstance(response := event.get("response"), dict):
            self._response = response
        if kind == "response.output_item.done" and isinstance(index := event.get("output_index"), int):
            self._items[index] = event.get("item")
        return _encode(kind, event) if changed else raw

    def flush(self) -> bytes:
        return b""

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

    def _clean(self, event: Json) -> bool:
        """Take out what was injected, in place; whether there was a place for any of it."""
        changed = False
        if isinstance(response := event.get("response"), dict):
            changed = self._api.clean(response, self._injection)
        if self._injection.logprobs:
            if event.get("logprobs"):
                event["logprobs"], changed = [], True
            # vLLM's parts without log-probabilities have an empty list when they open, and null when they are done.
            empty: list[Any] | None = [] if event.get("type") == "response.content_part.added" else None
            for part in _text_parts([event.get("item")], event.get("part")):
                changed = changed or bool(part["logprobs"])
                part["logprobs"] = empty if part["logprobs"] else part["logprobs"]
        return changed


def _as_chat(response: Json) -> Json:
    """A response with its tokens where `Tokens` looks for them."""
    prompt = [token for message in dicts(response.get("input_messages")) for token in _list(message.get("tokens"))]
    messages = dicts(response.get("output_messages"))
    entries = [entry for part in _text_parts(response.get("output")) for entry in _list(part.get("logprobs"))]
    choice: Json = {"index": 0, "finish_reason": _finish_reason(response), "logprobs": {"content": entries}}
    if messages:
        choice["token_ids"] = [token for message in messages for token in _list(message.get("tokens"))]
    return {"choices": [choice], "usage": response.get("usage"), "prompt_token_ids": prompt}


def _finish_reason(response: Json) -> str | None:
    details = response.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        return "length"
    if any(map(is_call, dicts(response.get("output")))):
        return "tool_calls"
    return "stop" if response.get("status") == "completed" else None


def _text_parts(items: Any, part: Any = None) -> Iterator[Json]:
    """The parts of output items, or `part` itself, that are text and have a place for log-probabilities."""
    parts = [p for item in dicts(items) for p in dicts(item.get("content"))] + (
        [part] if isinstance(part, dict) else []
    )
    return (p for p in parts if p.get("type") == "output_text" and "logprobs" in p)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _encode(kind: str, event: Json) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode(event) + b"\n\n"
