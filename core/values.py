"""Reads values that clients and servers write in different ways: numbers, flags, errors and states. Does no I/O."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from .json_text import dumps
from .sse import event_name

Json = dict[str, Any]


def number(value: Any) -> int | None:
    """Return an index, which some servers write as "1" or 1.0; None if it is invalid."""
    read = value if type(value) in (int, bool) else lax(int, value)
    return read if type(read) is int else None


_READ_AS: dict[str, type] = {
    name: kind
    for kind, names in (
        (int, "n seed top_k top_logprobs max_tokens max_completion_tokens max_output_tokens"),
        (float, "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty"),
        (bool, "stream include_usage return_token_ids echo use_beam_search watermarking"),
        (bool, "parallel_tool_calls add_generation_prompt background"),
    )
    for name in names.split()
}
_LAX: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (bool, int, float)}


def as_read(request: Json) -> Json:
    """Return the request with numbers and flags as vLLM reads them, such as "1" as 1. Invalid values stay unchanged."""
    read = {}
    for name, value in request.items():
        kind = _READ_AS.get(name)
        if kind is not None and value is not None and type(value) is not kind:
            read[name] = lax(kind, value)
    return request | read if read else request


def lax(kind: type, value: Any) -> Any:
    """Return the value as pydantic's lax mode reads it, unchanged if that fails."""
    try:
        return _LAX[kind].validate_python(value)
    except ValidationError:
        return value


# Fields with an error's message, and others that errors may have. An event with only these is an error.
_MESSAGES = ("message", "detail", "error_msg", "error_message", "msg")
_BESIDE = frozenset({"code", "status", "status_code", "type", "param", "request_id", "error_code", "object", "success"})


SAID = "the upstream sent an error: "


def error_in(raw: bytes, event: Json) -> Any:
    """Return the error that an event contains, or the event itself if it is an error; None if it is neither."""
    if (error := named_error(event)) is not None:
        return error
    if event.get("choices") is not None:
        return None
    if "error" in (event.get("type"), event.get("object")) or event_name(raw) == "error":
        return event
    has_message = any(event.get(name) for name in _MESSAGES)
    return event if has_message and all(name in _MESSAGES or name in _BESIDE for name in event) else None


def named_error(body: Json) -> Any:
    """Return the error in an answer or event, or else in one of its choices; None if there is none."""
    if error := body.get("error") or body.get("errors"):
        return error
    choices = body.get("choices")
    choices = choices if isinstance(choices, list) else ()
    return next((error for choice in choices if isinstance(choice, dict) and (error := choice.get("error"))), None)


def message_of_error(error: Any) -> str:
    if isinstance(error, dict):
        message = next((error[name] for name in _MESSAGES if error.get(name)), None)
        error = dumps(error) if message is None else message
    return f"{SAID}{error}"[:1000]


def is_under_way(response: Any) -> bool:
    """Return whether a response is queued or in progress."""
    return isinstance(response, dict) and response.get("status") in ("queued", "in_progress")
