"""Finds the errors that upstreams send within a stream. Pure."""

from __future__ import annotations

from typing import Any

from ..json_text import dumps
from .sse import event_name

Json = dict[str, Any]

# Where errors say what happened, and what some have beside that. An event of nothing else is an error.
_MESSAGES = ("message", "detail", "error_msg", "error_message", "msg")
_BESIDE = frozenset({"code", "status", "status_code", "type", "param", "request_id", "error_code", "object", "success"})


def error_in(raw: bytes, event: Json) -> Any:
    """Return the error that an event has or is, whether or not it says that it is one; None if there is none."""
    if (error := told_error(event)) is not None:
        return error
    if event.get("choices") is not None:
        return None
    if "error" in (event.get("type"), event.get("object")) or event_name(raw) == "error":
        return event
    told = any(event.get(name) for name in _MESSAGES)
    return event if told and all(name in _MESSAGES or name in _BESIDE for name in event) else None


def told_error(body: Json) -> Any:
    """Return the error that an answer or an event names, or one of its choices; None if there is none."""
    if error := body.get("error") or body.get("errors"):
        return error
    choices = body.get("choices")
    told = (choice.get("error") for choice in choices if isinstance(choice, dict)) if isinstance(choices, list) else ()
    return next(filter(None, told), None)


def message_of_error(error: Any) -> str:
    """Return what an error says, for the record."""
    if isinstance(error, dict):
        message = next((error[name] for name in _MESSAGES if error.get(name)), None)
        error = dumps(error) if message is None else message
    return f"the upstream sent an error: {error}"[:1000]
