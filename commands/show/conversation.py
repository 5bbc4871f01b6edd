"""Compares the messages of calls, so that each is shown once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...proxy.conversation.transcript import Turn

Message = dict[str, Any]
Core = tuple[Any, ...]


def additions(turns: Sequence[Turn]) -> list[list[Message]]:
    """Return each call's new messages: all after the longest beginning that it shares with an earlier call."""
    earlier: list[list[Core]] = []
    added = []
    for turn in turns:
        shown = [core(message) for message in turn.shown]
        added.append(turn.shown[max((_shared(shown, known) for known in earlier), default=0) :])
        earlier.append(shown + [core(message) for message in turn.said])
    return added


def core(message: Message) -> Core:
    """Return what makes a message the same one. Clients add and drop empty fields, and give calls other ids."""
    tools = tuple((tool.get("name"), json.dumps(tool.get("arguments"), sort_keys=True)) for tool in called(message))
    return message.get("role"), body(message).strip(), tools


def called(message: Message) -> list[Message]:
    """Return the functions that a message calls."""
    return [tool.get("function") or tool for tool in message.get("tool_calls") or ()]


def body(message: Message) -> str:
    """Return the message's text; of what is no message all its fields, as JSON."""
    return text(message) if "role" in message else json.dumps(message)


def text(message: Message) -> str:
    """Return the message's text. Content parts that are no text show their type."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    return "\n".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in parts)


def _shared(a: Sequence[Core], b: Sequence[Core]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
