"""Turns the tools of a Messages request, and the choice among them, into chat's."""

from __future__ import annotations

from typing import Any

from .reading import objects, optional, required
from .translation import Untranslatable

Json = dict[str, Any]

_WORDS = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(body: Json) -> Json:
    """Return the fields of a chat request that are about tools; raise Untranslatable."""
    given = body.get("tools")
    tools = [_tool(tool) for tool in objects(given, "tools")] if given is not None else []
    # The chat route refuses an empty list. Null is not what the route takes for an absent choice.
    return ({"tools": tools} if tools else {}) | _choice(body, [tool["function"]["name"] for tool in tools])


def _tool(tool: Json) -> Json:
    schema = required(tool, "input_schema", "an object")
    function = {"name": required(tool, "name", "text"), "parameters": {**schema, "type": schema.get("type", "object")}}
    for name, kind in {"description": "text", "strict": "true or false", "defer_loading": "true or false"}.items():
        if (value := optional(tool, name, kind)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _choice(body: Json, names: list[str]) -> Json:
    choice = optional(body, "tool_choice", "an object")
    if choice is None:
        return {"tool_choice": "auto" if names else None}
    kind = choice.get("type")
    if kind not in (*_WORDS, "tool"):
        raise Untranslatable(f"vLLM does not know the tool choice {kind!r}")
    parallel = {"parallel_tool_calls": not optional(choice, "disable_parallel_tool_use", "true or false")}
    if kind == "tool":
        return parallel | {"tool_choice": {"type": "function", "function": {"name": _named(choice, names)}}}
    if kind == "any" and not names:
        raise Untranslatable("a tool must be called, and there is none")
    return parallel | {"tool_choice": _WORDS[kind] if names or kind == "none" else None}


def _named(choice: Json, names: list[str]) -> str:
    name = required(choice, "name", "text")
    if name not in names:
        raise Untranslatable(f"`tool_choice` names the tool {name!r}, which is not among `tools`")
    return str(name)
