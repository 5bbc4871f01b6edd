"""Turns the conversation of a Messages request into chat messages, as vLLM's own route does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .reading import objects, optional, required
from .template import TemplateUnknown
from .translation import Untranslatable

Json = dict[str, Any]

CHANGES = ("tool_addition", "tool_removal")

# Claude Code's first system block. It changes with every request, so vLLM leaves it out.
_BILLING = "x-anthropic-billing-header"
_BLOCKS = frozenset({
    "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking", *CHANGES,
})  # fmt: skip
_TEXTS = ("text", "id", "tool_use_id", "name", "tool_name", "thinking", "signature", "data")


def chat_messages(body: Json, merges_system: bool | None) -> list[Json]:
    """Return the chat messages of a request; raise Untranslatable.

    `merges_system`: whether the server moves all system messages to the front; None if that is not known.
    """
    messages = objects(body.get("messages"), "messages")
    for message in messages:
        _check(message)
    first = _system_texts(optional(body, "system", "text or a list"))
    if merges_system is not None:
        return _converted(first, messages, merges_system)
    merged, in_place = _converted(first, messages, True), _converted(first, messages, False)
    if merged != in_place:
        raise TemplateUnknown("a system message is inside the conversation, and where the server puts it is unknown")
    return merged


def chat_message(content: Any) -> Json:
    """Return the chat message for an assistant message of this content; raise Untranslatable."""
    message = {"role": "assistant", "content": content}
    _check(message)
    return _conversation_message(message)[-1]


def _check(message: Json) -> None:
    if message.get("role") not in ("user", "assistant", "system"):
        raise Untranslatable(f"a message has the role {message.get('role')!r}")
    content = required(message, "content", "text or a list")
    if isinstance(content, list):
        _check_blocks(content, message["role"])


def _check_blocks(content: list[Any], role: str) -> None:
    """Raise Untranslatable if these are no content blocks that vLLM knows."""
    for block in objects(content, "content blocks"):
        if block.get("type") not in _BLOCKS:
            raise Untranslatable(f"vLLM does not take content blocks of type {block.get('type')!r}")
        if block["type"] in CHANGES and role != "system":
            raise Untranslatable(f"a block of type {block['type']} is not in a system message")
        for name in _TEXTS:
            optional(block, name, "text")
        for name in ("source", "input"):
            optional(block, name, "an object")
        optional(block, "is_error", "true or false")
        optional(block, "content", "text or a list")


def _converted(first: list[str], messages: list[Json], merges_system: bool) -> list[Json]:
    later = [text for message in messages if message["role"] == "system" if (text := _inline_text(message))]
    system = "".join([*first, *later] if merges_system else first)
    out: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        if message["role"] != "system":
            out += _conversation_message(message)
        elif not merges_system and (text := _inline_text(message)):
            out.append({"role": "system", "content": text})
    return out


def _system_texts(system: Any) -> list[str]:
    if not system:
        return []
    if isinstance(system, str):
        return [system]
    _check_blocks(system, "")
    return _texts(system)


def _inline_text(message: Json) -> str:
    content = message["content"]
    if isinstance(content, str):
        return "" if content.startswith(_BILLING) else content
    return "".join(_texts(content))


def _texts(blocks: list[Json]) -> list[str]:
    texts = [block.get("text") or "" for block in blocks if block["type"] == "text"]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _conversation_message(message: Json) -> list[Json]:
    """The chat messages for one of the user or the assistant: tool results come before the other blocks."""
    if isinstance(message["content"], str):
        return [{"role": message["role"], "content": message["content"]}]
    collected = _Collected(message["role"])
    for block in message["content"]:
        collected.add(block)
    own = collected.message()
    return collected.results if own is None else [*collected.results, own]


@dataclass
class _Collected:
    """The blocks of one message, sorted into the places that they have in chat."""

    role: str
    results: list[Json] = field(default_factory=list)
    parts: list[Json] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def add(self, block: Json) -> None:
        kind = block["type"]
        if kind == "text" and block.get("text"):
            self.parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            self.parts.append(_image(block["source"]))
        elif kind == "thinking" and block.get("thinking") is not None:
            self.reasoning.append(block["thinking"])
        elif kind == "tool_use":
            self.calls.append(_call(block))
        elif kind == "tool_result" and self.role == "user":
            self.results += _results(block)
        elif kind == "tool_result":
            result = str(block["content"]) if block.get("content") else ""
            self.parts.append({"type": "text", "text": f"Tool result: {result}"})

    def message(self) -> Json | None:
        """Return the message itself, None if nothing is left of it."""
        message: Json = {"role": self.role}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.parts:
            only_text = len(self.parts) == 1 and self.parts[0]["type"] == "text"
            message["content"] = self.parts[0]["text"] if only_text else self.parts
        return None if self.role == "user" and not self.parts else message


def _call(block: Json) -> Json:
    if not block.get("id"):
        raise Untranslatable("a tool_use block has no id")
    # With the standard library's blanks: a template may show the text as it is.
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _results(block: Json) -> list[Json]:
    """The chat messages for a tool's result: its text, then its images, then the tools that it names."""
    content = block.get("content") or ""
    items = [] if isinstance(content, str) else objects(content, "a tool result's blocks")
    texts = [required(item, "text", "text") for item in items if item.get("type") == "text" and "text" in item]
    images = [_image(required(item, "source", "an object")) for item in items if item.get("type") == "image"]
    names = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    answer = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    out = [answer | {"content": content if isinstance(content, str) else "\n".join(texts)}]
    if images := [image for image in images if image["image_url"]["url"]]:
        out.append({"role": "user", "content": images})
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        out.append(answer | {"content": references})
    return out


def _image(source: Json) -> Json:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}
