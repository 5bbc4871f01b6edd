"""Reads numbers and errors, and joins the values that a stream's chunks have under one name. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .json_text import dumps
from .sse import event_name

Json = dict[str, Any]

# By the last word of their names, texts that are sent in full, and by some servers again in every chunk.
_WORDS = frozenset({
    "role", "id", "type", "name", "reason", "object", "format", "status", "model", "provider", "phase", "channel",
    "signature",
})  # fmt: skip
# Parts of a content that are streamed in pieces, each in a part of its own.
_TEXT_PARTS = frozenset({"text", "thinking", "output_text", "reasoning"})


def join(into: Json, name: str, value: Any) -> None:
    """Join a value to that of the chunks before: texts and lists get longer; null, and no text, change nothing."""
    old = into.get(name)
    if value is None:
        into.setdefault(name, None)
    elif isinstance(value, str):
        into[name] = _with_text(old, value, is_word=_is_word(name))
    elif isinstance(value, dict):
        merged = into[name] = old if isinstance(old, dict) else {}  # ours: no chunk's own object is ever put in
        for key, item in value.items():
            join(merged, key, item)
    elif isinstance(value, list):
        before = (
            old if isinstance(old, list) else [{"type": "text", "text": old}] if old and isinstance(old, str) else []
        )
        into[name] = _with_items(before, value)
    else:
        into[name] = value


def put(into: Json, name: str, value: Any) -> None:
    """Keep the last value that is not empty; objects are joined name by name."""
    old = into.get(name)
    if isinstance(value, dict) and isinstance(old, dict):
        merged = into[name] = dict(old)
        for key, item in value.items():
            put(merged, key, item)
    elif value or value == 0 or name not in into:
        into[name] = value


def number(value: Any) -> int | None:
    """Return an index, which some servers write as a text or with a fraction of 0; None if it is none."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value)


class Places:
    """Orders pieces by their index. Some servers leave it out or repeat it: then the piece is behind all others."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._last = 0

    def take(self, index: int | None) -> int:
        place = self._last if index is None or index in self._taken else index
        self._taken.add(place)
        self._last = max(self._last, place)
        return place


_READ_AS: dict[str, type] = {
    **dict.fromkeys(
        ("n", "seed", "top_k", "top_logprobs", "max_tokens", "max_completion_tokens", "max_output_tokens"), int
    ),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), float),
    **dict.fromkeys(("stream", "include_usage", "return_token_ids", "echo", "use_beam_search", "watermarking"), bool),
    **dict.fromkeys(("parallel_tool_calls", "add_generation_prompt", "background"), bool),
}
_LAX: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (bool, int, float)}


def as_read(request: Json) -> Json:
    """Return the request as vLLM reads it, which takes "1" for 1 and 1 for true; what it refuses stays."""
    read = {}
    for name, value in request.items():
        kind = _READ_AS.get(name)
        if kind is not None and value is not None and type(value) is not kind:
            read[name] = lax(kind, value)
    return request | read if read else request


def lax(kind: type, value: Any) -> Any:
    """Return the value as pydantic reads it by default; as it is, if it cannot be read as this."""
    try:
        return _LAX[kind].validate_python(value)
    except ValidationError:
        return value


def objects(value: Any) -> list[Json]:
    """Return the objects in a list, or a single one that stands in the place of a list."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, dict)]


@lru_cache(256)
def _is_word(name: str) -> bool:
    return name.rpartition("_")[2] in _WORDS


def _with_text(old: Any, text: str, *, is_word: bool) -> Any:
    if isinstance(old, str):
        return (text or old) if is_word else old + text
    if isinstance(old, list):
        return _with_items(old, [{"type": "text", "text": text}]) if text else old
    return old if isinstance(old, dict) and not text else text


def _with_items(old: list[Any], new: list[Any]) -> list[Any]:
    """The list with the new items added. An item that continues an old one is joined to it."""
    items = old  # ours
    for place, item in enumerate(new):
        at = _continued(items, item, first=place == 0)
        if at is None:
            items.append(item)
            continue
        longer = dict(items[at])
        for name, value in item.items():
            join(longer, name, value)
        items[at] = longer
    return items


def _continued(items: list[Any], item: Any, *, first: bool) -> int | None:
    """The place of the item that this one continues: that of its index, or the last, of the same type."""
    if not isinstance(item, dict) or not items:
        return None
    kind, index = item.get("type"), item.get("index")
    if isinstance(index, int):
        same = (at for at, other in enumerate(items) if isinstance(other, dict) and other.get("index") == index)
        return next((at for at in same if items[at].get("type") == kind), None)
    last = items[-1]
    is_next = first and kind in _TEXT_PARTS and isinstance(last, dict) and last.get("type") == kind
    return len(items) - 1 if is_next else None


# Where errors say what happened, and what some have beside that. An event of nothing else is an error.
_MESSAGES = ("message", "detail", "error_msg", "error_message", "msg")
_BESIDE = frozenset({"code", "status", "status_code", "type", "param", "request_id", "error_code", "object", "success"})


SAID = "the upstream sent an error: "


def error_in(raw: bytes, event: Json) -> Any:
    """Return the error that an event has or is, also without an `error` field; None if there is none."""
    if (error := named_error(event)) is not None:
        return error
    if event.get("choices") is not None:
        return None
    if "error" in (event.get("type"), event.get("object")) or event_name(raw) == "error":
        return event
    has_message = any(event.get(name) for name in _MESSAGES)
    return event if has_message and all(name in _MESSAGES or name in _BESIDE for name in event) else None


def named_error(body: Json) -> Any:
    """Return the error that an answer or an event names, or one of its choices; None if there is none."""
    if error := body.get("error") or body.get("errors"):
        return error
    choices = body.get("choices")
    errors = (
        (choice.get("error") for choice in choices if isinstance(choice, dict)) if isinstance(choices, list) else ()
    )
    return next(filter(None, errors), None)


def message_of_error(error: Any) -> str:
    """Return an error's message, for the record."""
    if isinstance(error, dict):
        message = next((error[name] for name in _MESSAGES if error.get(name)), None)
        error = dumps(error) if message is None else message
    return f"{SAID}{error}"[:1000]


def is_under_way(response: Any) -> bool:
    """Return whether a response goes on after its answer, to be polled: one with `background: true`."""
    return isinstance(response, dict) and response.get("status") in ("queued", "in_progress")
