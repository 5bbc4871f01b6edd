"""Makes chat messages of the items of Responses. Items that one turn of the model consists of become one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ....core.json_text import dumps
from .translation import Untranslatable

Json = dict[str, Any]

# vLLM shows the model a custom tool as a function with this one argument.
CUSTOM_INPUT = "input"
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_TEXTS = frozenset({"input_text", "output_text"})


def messages_of(items: Iterable[Json]) -> list[Json]:
    """Return the messages that items become, oldest first; raise Untranslatable."""
    messages: list[Json] = []
    for item in items:
        message = _message(item)
        if not messages or not _joins(messages[-1], message):
            messages.append(message)
    return messages


def flat_name(namespace: Any, name: str) -> str:
    """Return the name by which vLLM shows the model a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def _message(item: Json) -> Json:
    kind = item.get("type") or "message"
    make = _BY_TYPE.get(kind)
    if make is None:
        raise Untranslatable(f"an item of type {kind} cannot be written as chat")
    return make(item)


def _joins(before: Json, message: Json) -> bool:
    """Add a part of the model's turn to the one before, as vLLM does; return whether it belongs there."""
    if not before["role"] == message["role"] == "assistant":
        return False
    if calls := message.get("tool_calls"):
        before["tool_calls"] = [*before.get("tool_calls", ()), *calls]
        return True
    (name,) = message.keys() - {"role"}
    if name not in before:
        before[name] = message[name]
        return True
    if name == "content" and "tool_calls" in before:  # text after a call, which chat has in one piece
        before[name] += message[name]
        return True
    return False


def _spoken(item: Json) -> Json:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise Untranslatable(f"a message of role {role}")
    if role == "assistant":
        return {"role": role, "content": _text(content)}
    return {"role": role, "content": content if isinstance(content, str) else _parts(content)}


def _reasoning(item: Json) -> Json:
    text = "".join(part["text"] for part in item.get("content") or ())
    if not text:
        text = "\n\n".join(part["text"] for part in item.get("summary") or ())
    if not text and item.get("encrypted_content"):
        raise Untranslatable("encrypted reasoning")
    return {"role": "assistant", "reasoning": text}


def _function_call(item: Json) -> Json:
    return _call(item, flat_name(item.get("namespace"), item["name"]), item["arguments"])


def _custom_call(item: Json) -> Json:
    return _call(item, item["name"], dumps({CUSTOM_INPUT: item.get("input") or ""}))


def _call(item: Json, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


def _result(item: Json) -> Json:
    output = item["output"]
    content = output if isinstance(output, str) else _parts(output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _text(content: Any) -> str:
    """All text parts, joined; vLLM would keep only the first."""
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else _part(part)["text"] for part in content)


def _parts(content: Any) -> list[Json]:
    return [_part(part) for part in content]


def _part(part: Json) -> Json:
    kind = part["type"]
    if kind in _TEXTS:
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": part["refusal"]}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_audio":
        return {"type": kind, kind: part[kind]}
    raise Untranslatable(f"content of type {kind}")


_BY_TYPE: Mapping[str, Callable[[Json], Json]] = MappingProxyType(
    {
        "message": _spoken,
        "reasoning": _reasoning,
        "function_call": _function_call,
        "custom_tool_call": _custom_call,
        "function_call_output": _result,
        "custom_tool_call_output": _result,
    }
)
