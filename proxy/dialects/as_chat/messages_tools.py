"""Turns the tools of a Messages request, and the choice among them, into chat's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .messages_history import CHANGES
from .reading import objects, optional, required
from .template import TemplateUnknown
from .translation import Untranslatable

Json = dict[str, Any]

_WORDS = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(body: Json, ignores_no_tools: bool | None) -> Json:
    """Return the tool fields of a chat request; raise Untranslatable.

    `ignores_no_tools`: whether an empty list is as none to the server's template, None if that is not known.
    """
    given = None if body.get("tools") is None else objects(body["tools"], "tools")
    in_effect = _in_effect(given, list(_changes(body["messages"])))
    if in_effect == [] and not ignores_no_tools:
        raise (TemplateUnknown if ignores_no_tools is None else Untranslatable)("the list of tools is empty")
    tools = [_tool(tool) for tool in in_effect or ()]
    # The chat route refuses an empty list. Null is not what the route takes for an absent choice.
    return ({"tools": tools} if tools else {}) | _choice(body, [tool["function"]["name"] for tool in tools])


def _changes(messages: list[Json]) -> Iterator[tuple[str, Json]]:
    for message in messages:
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] in CHANGES:
                yield block["type"], required(block, "tool", "an object")


def _in_effect(given: list[Json] | None, changes: list[tuple[str, Json]]) -> list[Json] | None:
    """The tools at the end of the conversation."""
    if not changes:
        return given
    tools = {required(tool, "name", "text"): tool for tool in given or ()}
    removed: dict[str, bool] = {}
    for kind, change in changes:
        if kind == "tool_addition" and change.get("type") == "tool_definition":
            tool = required(change, "definition", "an object")
            tools[required(tool, "name", "text")] = tool
        elif change.get("type") == "tool_reference" and change.get("name") in tools:
            tool = tools[change["name"]]
            if kind == "tool_addition":
                tools[tool["name"]] = tool | {"defer_loading": None}
        else:
            raise Untranslatable("a tool that is added or removed is unknown")
        removed[tool["name"]] = kind == "tool_removal"
    return [tool for name, tool in tools.items() if not removed.get(name)]


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
