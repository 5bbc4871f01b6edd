"""Compares the messages of calls, so that each is shown once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .transcript import ChatTurn

Message = dict[str, Any]
Core = tuple[Any, ...]


def additions(turns: Iterable[ChatTurn]) -> Iterator[tuple[ChatTurn, list[Message]]]:
    """Yield each turn with its new messages: all after the longest beginning that it shares with an earlier one."""
    earlier: set[int] = set()
    for turn in turns:
        digests = [*beginnings(turn.messages)]
        shared = next((i for i in range(len(turn.shown), 0, -1) if digests[i] in earlier), 0)
        yield turn, turn.shown[shared:]
        earlier.update(digests)


def beginnings(messages: Sequence[Message]) -> Iterator[int]:
    """Yield a digest of every beginning of a conversation, from the empty one to all of it."""
    digest = hash(())
    yield digest
    for message in messages:
        digest = hash((digest, core(message)))
        yield digest


def core(message: Message) -> Core:
    """Return the identity of a message. Clients add and drop empty fields, and give calls other ids."""
    tools = tuple((tool.get("name"), json.dumps(tool.get("arguments"), sort_keys=True)) for tool in called(message))
    return message.get("role"), body(message).strip(), tools


def called(message: Message) -> list[Message]:
    """Return the functions that a message calls."""
    return [tool.get("function") or tool for tool in message.get("tool_calls") or ()]


def body(message: Message) -> str:
    """Return the message's text; for other items all fields, as JSON."""
    return text(message) if "role" in message else json.dumps(message)


def text(message: Message) -> str:
    """Return the message's text. Content parts that are no text show their type."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    return "\n".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in parts)
