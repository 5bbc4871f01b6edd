"""Reads the answers of /v1/responses as a server's own route gives them: without token ids.

The record has finished items as they were sent. Their missing fields, and items that were never finished, are filled in
from `added` events and deltas.
"""

from __future__ import annotations

from typing import Any

from ...core.sse import event_name
from ...core.tokens import Tokens
from ...core.tools import dicts, is_call
from ...core.values import error_in, message_of_error, number
from .assemble import AnswerParts, joined, put
from .stream import Dialect, Injection, Transcript

Json = dict[str, Any]

# The last event, in all spellings that are in use, and the response's status by it.
_LAST = {
    "response.completed": "completed", "response.done": "completed", "response.incomplete": "incomplete",
    "response.failed": "failed", "response.cancelled": "cancelled", "response.canceled": "cancelled",
}  # fmt: skip


class ResponsesApi(Dialect):
    def tokens(self, body: Json) -> Tokens:
        choice = {"index": 0, "finish_reason": _finish_reason(body)}
        return Tokens({"choices": [choice], "usage": body.get("usage")})

    def stream(self, injection: Injection) -> ResponsesStream:
        return ResponsesStream()


class ResponsesStream(Transcript):
    """A stream of events, each with a `type`. The last one should hold the full response."""

    def __init__(self) -> None:
        super().__init__()
        self._response: Json | None = None
        self._items = AnswerParts[_Item]()

    @property
    def tokens(self) -> Tokens:
        return ResponsesApi().tokens(self.response() or {})

    def take(self, raw: bytes, event: Json) -> bytes:
        response = event if event.get("object") == "response" else event.get("response")
        response = response if isinstance(response, dict) else {}
        kind = str(event.get("type") or event_name(raw) or (f"response.{response.get('status')}" if response else ""))
        self._feed_items(kind, event)
        if response:
            self._response = self._response or {}
            for name, value in response.items():
                put(self._response, name, value)
        error = None if kind.startswith("response.") else error_in(raw, event)
        self.finished = kind in _LAST or error is not None
        if error is not None:
            self.failure = message_of_error(error)
        elif self.finished:
            self._finish(_LAST[kind], event)
        return raw

    def response(self) -> Any:
        """Return the response as sent so far, with what its items lack filled in from other events."""
        items = [item.result() for item in self._items]
        if self._response is None:
            return {"object": "response", "output": items} if items else None
        output = self._response.get("output")
        if isinstance(output, list) and output:
            items = filled(output, items) if list(map(_type, output)) == list(map(_type, items)) else output
        return self._response | {"output": items}

    def _feed_items(self, kind: str, event: Json) -> None:
        """Keep the part of an item that an event of this type brings, if any."""
        name, _, what = kind.removeprefix("response.").rpartition(".")
        item = event.get("item")
        if name == "output_item" and isinstance(item, dict) and what in ("added", "done"):
            self._item_of(event, item, what).keep(item, what)
        elif text := _TEXTS.get(name.removesuffix(".annotation")) or _PARTS.get(_type(event.get("part"))):
            self._item_of(event, {"type": text[0], "id": event.get("item_id")}, "").add(text, what, event)

    def _item_of(self, event: Json, item: Json, what: str) -> _Item:
        """The item that an event is about; a new one if it is not known yet. `what`: added, done, or empty for a text.

        Some servers give several items the same index, or each event a new id.
        """
        index, item_id = number(event.get("output_index")), item.get("id")
        known = (self._items.get(item_id) if item_id else None) or self._items.get(index)
        if known is None or known.ends_before(item, what):
            known = self._items.open(index, _Item(item))
        self._items.keep(known, index, known.id)
        return known

    def _finish(self, status: str, event: Json) -> None:
        response = self._response = self._response or {"object": "response"}
        if response.get("status") in (None, "", "in_progress", "queued"):
            response["status"] = status
        if not response.get("usage") and isinstance(usage := event.get("usage"), dict):
            response["usage"] = usage
        if error := response.get("error") or event.get("error"):
            self.failure = message_of_error(error)
        elif response["status"] in ("failed", "cancelled", "canceled"):
            self.failure = f"the upstream reports a response with status {response['status']}"


def _type(item: Any) -> str:
    return str(item.get("type")) if isinstance(item, dict) else ""


def _finish_reason(response: Json) -> str | None:
    details = response.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        return "length"
    if any(map(is_call, dicts(response.get("output")))):
        return "tool_calls"
    return "stop" if response.get("status") == "completed" else None


# Where a text that comes in deltas belongs: the type of its item, the field, and if it is in a part, its type and list.
_Text = tuple[str, str, str, str]
_TEXTS: dict[str, _Text] = {
    "output_text": ("message", "text", "output_text", "content"),
    "refusal": ("message", "refusal", "refusal", "content"),
    "reasoning_text": ("reasoning", "text", "reasoning_text", "content"),
    "reasoning_summary_text": ("reasoning", "text", "summary_text", "summary"),
    "function_call_arguments": ("function_call", "arguments", "", ""),
    "custom_tool_call_input": ("custom_tool_call", "input", "", ""),
    "mcp_call_arguments": ("mcp_call", "arguments", "", ""),
    "code_interpreter_call_code": ("code_interpreter_call", "code", "", ""),
}
# By the type of a part that comes in one piece.
_PARTS = {part: text for text in _TEXTS.values() if (part := text[2])}


class _Item:
    """One item as received so far: from its added or done event, completed by the events about its texts."""

    def __init__(self, item: Json) -> None:
        self.id, self._type = item.get("id"), item.get("type")
        self._state = ""  # or added, or done
        self._item = {"type": self._type} | ({"id": self.id} if self.id else {})
        self._item |= {"role": "assistant"} if self._type == "message" else {}
        self._made: Json = {}
        self._parts: dict[tuple[str, int], Json] = {}

    def ends_before(self, item: Json, what: str) -> bool:
        """Return whether a piece that seems to belong to this item begins a new one."""
        if self.id is not None and item.get("id") == self.id:
            return False
        return item.get("type") != self._type or self._state == "done" or (what == "added" and self._state == "added")

    def keep(self, item: Json, what: str) -> None:
        if what == "done" or not self._state:
            self._item, self._state, self._type = item, what, item.get("type")

    def add(self, text: _Text, what: str, event: Json) -> None:
        _, field, kind, in_list = text
        made, part, logprobs = self._made, event.get("part"), dicts(event.get("logprobs"))
        new = {field: event.get("delta" if what == "delta" else field) or ""}
        new |= {"logprobs": logprobs} if logprobs else {}
        if in_list:
            index = number(event.get("content_index", event.get("summary_index"))) or 0
            made = self._parts.setdefault((in_list, index), {"type": kind, field: ""})
        if "annotation" in event:
            joined(made, {"annotations": [event["annotation"]]}, "")
        elif what == "delta":
            joined(made, new, "")
        else:
            for name, value in (part if isinstance(part, dict) else new).items():
                put(made, name, value)

    def result(self) -> Json:
        made = dict(self._made)
        for (in_list, _), part in sorted(self._parts.items(), key=lambda entry: entry[0]):
            made.setdefault(in_list, []).append(part)
        return filled(self._item, made)


def filled(value: Any, more: Any) -> Any:
    """Return `value`, with its missing or empty fields filled in from `more`."""
    if isinstance(value, dict) and isinstance(more, dict):
        return more | {name: filled(item, more.get(name)) for name, item in value.items()}
    if isinstance(value, list) and isinstance(more, list) and len(value) == len(more):
        return [filled(item, other) for item, other in zip(value, more, strict=True)]
    return value if value or value == 0 or more is None else more
