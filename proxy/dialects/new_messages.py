"""Compares the messages of calls, so that each is shown once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...core.tools import dicts
from .transcript import ChatTurn

Message = dict[str, Any]
Core = tuple[Any, ...]


def additions(turns: Iterable[ChatTurn]) -> Iterator[tuple[ChatTurn, list[Message]]]:
    """Yield each turn with its new messages: all after the longest beginning that it shares with an earlier one."""
    earlier, known = set[int](), Digested()
    for turn in turns:
        digests = [*beginnings(turn.messages, known)]
        shared = next((i for i in range(len(turn.shown), 0, -1) if digests[i] in earlier), 0)
        yield turn, turn.shown[shared:]
        earlier.update(digests)


class Digested(dict[int, tuple[Message, int]]):
    """The digests of the messages of one conversation, so that the next one, which mostly goes on, makes new ones only.

    It has the messages, too: while it does, no other message has their `id`.
    """


def beginnings(messages: Sequence[Message], known: Digested) -> Iterator[int]:
    """Yield a digest of every beginning of a conversation, from the empty one to all of it."""
    now = {id(one): known.get(id(one)) or (one, hash(core(one))) for one in messages}
    known.clear()
    known.update(now)
    digest = hash(())
    yield digest
    for message in messages:
        digest = hash((digest, now[id(message)][1]))
        yield digest


def core(message: Message) -> Core:
    """Return the identity of a message. Clients add and drop empty fields, and give calls other ids."""
    tools = tuple((str(one.get("name")), json.dumps(one.get("arguments"), sort_keys=True)) for one in called(message))
    return str(message.get("role")), body(message).strip(), tools


def called(message: Message) -> list[Message]:
    """Return the functions that a message calls."""
    tools = dicts(message.get("tool_calls"))
    return [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]


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
