"""Turns a call of the control API into messages: the model's input and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def shown(call: dict[str, Any]) -> list[Message]:
    """Return the messages of the request. A plain prompt becomes one message of the user."""
    request = call["request"]
    found = request.get("messages", request.get("input", request.get("prompt", [])))
    if isinstance(found, list) and all(isinstance(message, dict) for message in found):
        return found
    return [{"role": "user", "content": found}]


def answer(call: dict[str, Any]) -> Message | None:
    """Return the first answer as a message; None if the call has none."""
    response = call["response"] if isinstance(call["response"], dict) else {}
    if isinstance(response.get("output"), list):  # /v1/responses
        parts = [part for item in response["output"] for part in item.get("content") or ()]
        calls = [item for item in response["output"] if item.get("type") == "function_call"]
        return {"role": "assistant", "content": text({"content": parts}), "tool_calls": calls}
    if isinstance(response.get("content"), list):  # /v1/messages
        return {"role": "assistant", "content": response["content"]}
    choices = response.get("choices") or [None]
    first = choices[0] if isinstance(choices[0], dict) else {}
    if "text" in first:
        return {"role": "assistant", "content": first["text"]}
    message = first.get("message")
    return message if isinstance(message, dict) else None


def whole(call: dict[str, Any]) -> list[Message]:
    """Return the messages of the request and the answer, without the answer's empty fields."""
    last = answer(call)
    filled = {name: value for name, value in (last or {}).items() if name == "content" or value not in (None, [], "")}
    return shown(call) + ([filled] if last else [])


def shared(a: Sequence[Message], b: Sequence[Message]) -> int:
    """Return how many leading messages are the same. Empty fields do not count: clients add and drop them."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if _core(a[i]) != _core(b[i])), length)


def additions(calls: Sequence[dict[str, Any]]) -> list[list[Message]]:
    """Return each call's new messages: all after the longest beginning that it shares with an earlier call."""
    earlier: list[list[Message]] = []
    added = []
    for call in calls:
        messages = shown(call)
        added.append(messages[max((shared(messages, known) for known in earlier), default=0) :])
        earlier.append(whole(call))
    return added


def longest(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answered calls whose conversation no later call continues."""
    answered = [call for call in calls if call["status"] == "ok" and not call["superseded_by"] and answer(call)]
    return [
        call
        for i, call in enumerate(answered)
        if not any(shared(whole(call), shown(later)) == len(whole(call)) for later in answered[i + 1 :])
    ]


def text(message: Message) -> str:
    """Return the message's text. Content parts that are no text show their type."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    return "\n".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in parts)


def _core(message: Message) -> tuple[Any, ...]:
    tools = [tool.get("function", tool) for tool in message.get("tool_calls") or []]
    return message.get("role"), text(message), tools, message.get("tool_call_id")
