"""POST /v1/responses, as a server answers it itself: without the tokens of all its text. `as_chat/` gets those.

In the record, an item that is done counts as it is; what it lacks, or what never was done, is made of what was added
and of deltas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.errors import LightningError
from ...core.sse import event_name
from ...core.tokens import Tokens
from ...core.tools import dicts, is_call
from ...core.values import Places, error_in, message_of_error, number
from .chat import Injection

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


class _Text(NamedTuple):
    """Where a text that comes in deltas belongs: in an item of type `item`, perhaps in a part in one of its lists."""

    item: str
    field: str
    part: str = ""
    in_list: str = ""


_TEXTS = {
    "output_text": _Text("message", "text", "output_text", "content"),
    "refusal": _Text("message", "refusal", "refusal", "content"),
    "reasoning_text": _Text("reasoning", "text", "reasoning_text", "content"),
    "reasoning_summary_text": _Text("reasoning", "text", "summary_text", "summary"),
    "function_call_arguments": _Text("function_call", "arguments"),
    "custom_tool_call_input": _Text("custom_tool_call", "input"),
    "mcp_call_arguments": _Text("mcp_call", "arguments"),
    "code_interpreter_call_code": _Text("code_interpreter_call", "code"),
}


class ResponseItems:
    """The items of one response. Some servers give several of them one index, or each event an id of its own."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._places = Places()
        self._at: dict[int | None, _Item] = {}  # by index: the item that came there last

    def feed(self, kind: str, event: Json) -> None:
        """Keep the part of an item that an event of this type brings, if it does."""
        name, _, what = kind.removeprefix("response.").rpartition(".")
        item = event.get("item")
        if name == "output_item" and isinstance(item, dict) and what in ("added", "done"):
            self._of(event, item, what == "done").keep(item, is_done=what == "done")
        elif text := _TEXTS.get(name.removesuffix(".annotation")) or _text_of(event.get("part")):
            self._of(event, {"type": text.item, "id": event.get("item_id")}, None).add(text, what, event)

    def result(self) -> list[Json]:
        """Return the items in order."""
        return [item.result() for item in sorted(self._items, key=lambda item: item.place)]

    def _of(self, event: Json, item: Json, is_done: bool | None) -> _Item:
        """The item that an event is about; a new one if it is about none that is known. `is_done`: None for a text."""
        index, item_id = number(event.get("output_index")), item.get("id")
        found = next((known for known in self._items if item_id and known.id == item_id), None) or self._at.get(index)
        if found is None or found.differs(item, is_done):
            found = _Item(self._places.take(index), item)
            self._items.append(found)
        self._at[index] = self._at[None] = found
        return found


class _Item:
    def __init__(self, place: int, item: Json) -> None:
        self.place = place
        self.id = item.get("id")
        self._type = item.get("type")
        self._item: Json | None = None
        self._is_done = False
        self._texts: dict[tuple[_Text, int], list[str]] = {}
        self._beside: dict[tuple[_Text, int], Json] = {}  # what else a part has: citations, log-probabilities

    def differs(self, item: Json, is_done: bool | None) -> bool:
        """Return whether a piece with another id, at the same place, belongs to another item."""
        if self.id is not None and item.get("id") == self.id:
            return False
        if item.get("type") != self._type:
            return True
        return self._is_done or (is_done is False and self._item is not None)

    def keep(self, item: Json, *, is_done: bool) -> None:
        if is_done or self._item is None:
            self._item, self._is_done, self._type = item, self._is_done or is_done, item.get("type")

    def add(self, text: _Text, what: str, event: Json) -> None:
        at = text, number(event.get("content_index", event.get("summary_index"))) or 0
        part, pieces = event.get("part"), self._texts.setdefault(at, [])
        beside = self._beside.setdefault(at, {})
        if isinstance(part, dict):
            self._beside[at] = filled({name: value for name, value in part.items() if name != text.field}, beside)
        elif "annotation" in event:
            beside["annotations"] = [*beside.get("annotations", ()), event["annotation"]]
        elif isinstance(logprobs := event.get("logprobs"), list) and logprobs:
            beside["logprobs"] = [*beside.get("logprobs", ()), *logprobs] if what == "delta" else logprobs
        if what == "delta" and isinstance(piece := event.get("delta"), str):
            pieces.append(piece)
        elif what == "done" and isinstance(full := (part or event).get(text.field), str) and full:
            pieces[:] = [full]

    def result(self) -> Json:
        if self._item is not None:
            return filled(self._item, self._made()) if self._texts else self._item
        bare = {"type": self._type} | ({"id": self.id} if self.id else {})
        return bare | ({"role": "assistant"} if self._type == "message" else {}) | self._made()

    def _made(self) -> Json:
        """The item that its texts make."""
        made: Json = {}
        for (text, place), pieces in sorted(self._texts.items(), key=lambda entry: entry[0][1]):
            joined = "".join(pieces)
            if text.in_list:
                part = {"type": text.part, text.field: joined} | self._beside[text, place]
                made.setdefault(text.in_list, []).append(part)
            else:
                made[text.field] = joined
        return made


def _text_of(part: Any) -> _Text | None:
    """Where the text of a part belongs that comes in one piece."""
    kind = part.get("type") if isinstance(part, dict) else None
    return next((text for text in _TEXTS.values() if text.part and text.part == kind), None)


def filled(value: Any, more: Any) -> Any:
    """Return a value with another's fields where its own are missing or empty."""
    if isinstance(value, dict) and isinstance(more, dict):
        return {name: filled(item, more.get(name)) for name, item in value.items()} | {
            name: item for name, item in more.items() if name not in value
        }
    if isinstance(value, list) and isinstance(more, list) and len(value) == len(more):
        return [filled(item, other) for item, other in zip(value, more, strict=True)]
    return value if value or value == 0 or more is None else more
