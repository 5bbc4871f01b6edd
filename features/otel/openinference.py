"""Reads spans of OpenInference's conventions as GenAI's. Pure.

https://arize-ai.github.io/openinference/spec/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.json_text import dumps, loads

Json = dict[str, Any]
Attributes = Mapping[str, Any]

_INVOCATION = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty", "seed")


def as_genai(attributes: Attributes) -> Attributes:
    """Return a span's attributes with their GenAI equivalents added. Its own GenAI attributes stay."""
    found = {name: value for name, value in _genai(attributes).items() if value not in (None, [])}
    return {**found, **attributes}


def parsed(value: Any) -> Any:
    """Return the value of an attribute: on spans, most structures are JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError:
        return value


def _genai(attributes: Attributes) -> Json:
    kind = attributes.get("openinference.span.kind")
    if kind == "AGENT":
        return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": attributes.get("agent.name")}
    if kind == "RETRIEVER":
        found = [_inner(one, "document") for one in _listed(_tree(attributes, "retrieval.documents"))]
        query = attributes.get("input.value")
        named = {"gen_ai.operation.name": "retrieval", "gen_ai.retrieval.query.text": query}
        return named | {"gen_ai.retrieval.documents": found}
    if kind != "LLM":
        return {"gen_ai.operation.name": str(kind).lower()} if kind is not None else {}
    given = parsed(attributes.get("llm.invocation_parameters"))
    parameters = {f"gen_ai.request.{name}": given.get(name) for name in _INVOCATION} if isinstance(given, dict) else {}
    tools = [parsed(_inner(one, "tool").get("json_schema")) for one in _listed(_tree(attributes, "llm.tools"))]
    return parameters | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": attributes.get("llm.model_name"),
        "gen_ai.input.messages": _inferred(attributes, "llm.input_messages", "input.value", "user"),
        "gen_ai.output.messages": _inferred(attributes, "llm.output_messages", "output.value", "assistant"),
        "gen_ai.tool.definitions": [tool for tool in tools if isinstance(tool, dict)],
        "gen_ai.usage.input_tokens": attributes.get("llm.token_count.prompt"),
        "gen_ai.usage.output_tokens": attributes.get("llm.token_count.completion"),
    }


def _inferred(attributes: Attributes, prefix: str, unnumbered: str, role: str) -> list[Json]:
    """The numbered messages; where there are none, the span's one input or output."""
    numbered = [_message(one["message"]) for one in _listed(_tree(attributes, prefix)) if _is_tree(one, "message")]
    if numbered or unnumbered not in attributes:
        return numbered
    value = parsed(attributes[unnumbered])
    messages = value.get("messages") if isinstance(value, dict) else value
    if isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages):
        return messages
    if isinstance(value, dict) and isinstance(value.get("choices"), list):
        return [one["message"] for one in value["choices"] if _is_tree(one, "message")]
    return [{"role": role, "content": value if isinstance(value, str) else attributes[unnumbered]}]


def _message(message: Json) -> Json:
    parts = [_inner(one, "message_content") for one in _listed(message.get("contents"))]
    calls = [_inner(one, "tool_call") for one in _listed(message.get("tool_calls"))]
    found: Json = {name: message[name] for name in ("name", "tool_call_id") if name in message}
    found |= {"role": message.get("role"), "content": message.get("content")}
    if parts and not isinstance(found["content"], str):
        found["content"] = joined([_content(part) for part in parts])
    if calls:
        found["tool_calls"] = [_called(call.get("id"), call.get("function")) for call in calls]
    elif "function_call_name" in message:
        function = {"name": message["function_call_name"], "arguments": message.get("function_call_arguments_json")}
        found["tool_calls"] = [_called(None, function)]
    return found


def _content(part: Json) -> Json:
    if _is_tree(part, "image"):
        return {"type": "image_url", "image_url": part["image"].get("image", part["image"])}
    return {"type": str(part.get("type") or "text"), **{name: part[name] for name in part if name != "type"}}


def _called(call_id: Any, function: Any) -> Json:
    named = function if isinstance(function, dict) else {}
    made = {"name": str(named.get("name") or ""), "arguments": _text(named.get("arguments"))}
    return {"id": call_id, "type": "function", "function": made}


def joined(content: list[Json]) -> Any:
    """Return a message's content: a string where it is text alone, as most clients send it."""
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content) if content else None
    return content


def _tree(attributes: Attributes, prefix: str) -> Json:
    """`prefix.0.message.role` and the like as nested objects."""
    root: Json = {}
    for name, value in attributes.items():
        if not name.startswith(prefix + "."):
            continue
        *path, last = name[len(prefix) + 1 :].split(".")
        node: Any = root
        for key in path:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.setdefault(last, value)
    return root


def _listed(tree: Any) -> list[Json]:
    """The objects among a tree's numbered branches, in order."""
    if not isinstance(tree, dict):
        return []
    numbered = sorted((int(key), key) for key in tree if key.isascii() and key.isdigit() and len(key) < 5)
    return [tree[key] for _, key in numbered if isinstance(tree[key], dict)]


def _inner(one: Json, name: str) -> Json:
    """The value below the name that a list's items have in OpenInference."""
    return one[name] if _is_tree(one, name) else one


def _is_tree(one: Any, name: str) -> bool:
    return isinstance(one, dict) and isinstance(one.get(name), dict)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps(value)
