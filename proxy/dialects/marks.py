"""Reads what only one answer has: the ids of its items and tool calls, signatures, thoughts. Pure.

Clients send these back as they are, also where they edit, shorten or leave out the answer itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...core.tools import dicts

Json = dict[str, Any]

UNIQUE, LONG = 9, 24  # characters from which on an id, or a thought, is no other answer's
# May be counted anew in every answer, or stand in an example: `functions.search:0`, `call_1`.
_COUNTED = re.compile(r".*:\d{1,5}|\D*\d{1,5}", re.DOTALL)


def is_counted(tool_call_id: str) -> bool:
    """Return whether an id looks as if other answers had it, too."""
    return _COUNTED.fullmatch(tool_call_id) is not None


def is_unique(mark: str) -> bool:
    """Return whether a mark looks as if no other answer had it."""
    return len(mark) >= UNIQUE and not is_counted(mark)


def answer_marks(response: Json) -> Iterator[str]:
    """Yield the marks of an answer of any recorded API."""
    for item in dicts(response.get("output")):
        yield from _of_item(item)
    yield from _of_item({"content": response.get("content")})
    for choice in dicts(response.get("choices")):
        if isinstance(message := choice.get("message"), dict):
            yield from _of_item(message)


def request_marks(request: Json) -> Iterator[str]:
    """Yield the marks of answers that a request sends back or refers to, the newest first."""
    for item in reversed(dicts(request.get("messages", request.get("input")))):
        yield from _of_item(item)


def _of_item(item: Json) -> Iterator[str]:
    """The marks of a message, or of an item of Responses."""
    if isinstance(item.get("type"), str):
        yield from _texts(item, "id", "encrypted_content")
    calls = [item, *dicts(item.get("tool_calls")), *(parts := dicts(item.get("content")))]
    names = ("call_id", "tool_call_id", "tool_use_id", "id")
    yield from (text for call in calls for text in _texts(call, *names) if not is_counted(text))
    for part in [*parts, *dicts(item.get("reasoning_details"))]:
        yield from _texts(part, "signature", "data")
    for name in ("reasoning", "reasoning_content"):
        yield from (text for text in _texts(item, name) if len(text) >= LONG)


def _texts(part: Json, *names: str) -> Iterator[str]:
    return (text for name in names if isinstance(text := part.get(name), str) and text)
