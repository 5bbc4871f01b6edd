"""Translates the items and tools of Responses to chat, and the names of tools that the model called back.

Items that one turn of the model consists of become one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ....core.json_text import dumps
from .translation import Untranslatable

Json = dict[str, Any]

# vLLM shows the model a custom tool as a function with this one argument.
CUSTOM_INPUT = "input"
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_TEXTS = frozenset({"input_text", "output_text"})

_CUSTOM_PARAMETERS: Json = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_SHOWN = ("description", "parameters", "strict", "defer_loading")
_WEB = ("search_context_size", "user_location")
# The tools that vLLM takes, with the fields that its answer has also where the request left them out.
_FIELDS: dict[str, tuple[str, ...]] = {
    "function": ("parameters", "strict", "allowed_callers", "defer_loading", "description", "output_schema"),
    "custom": ("allowed_callers", "defer_loading", "description", "format"),
    "namespace": (),
    "web_search": ("filters", *_WEB),
    "web_search_2025_08_26": ("filters", *_WEB),
    "web_search_preview": ("search_content_types", *_WEB),
    "web_search_preview_2025_03_11": ("search_content_types", *_WEB),
    "file_search": ("filters", "max_num_results", "ranking_options"),
    "code_interpreter": ("allowed_callers",),
    "local_shell": (),
    "shell": ("allowed_callers", "environment"),
    "apply_patch": ("allowed_callers",),
    "tool_search": ("description", "execution", "parameters"),
    "mcp": (
        "allowed_callers", "allowed_tools", "authorization", "connector_id", "defer_loading", "headers",
        "require_approval", "server_description", "server_url", "tunnel_id",
    ),
}  # fmt: skip


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


class Tools:
    """The tools of one request. vLLM shows the model functions only: tools that a server runs itself are left out."""

    def __init__(self, tools: list[Json]) -> None:
        """Raise Untranslatable for tools that vLLM refuses."""
        self._tools = tools
        self._namespaced: dict[str, tuple[str, str]] = {}
        self._custom = {tool["name"] for tool in tools if tool["type"] == "custom"}
        self.chat = [_chat_tool(*function) for tool in tools for function in self._functions(tool)]

    def choice(self, choice: Any) -> Any:
        """Return `tool_choice` as chat has it; raise Untranslatable."""
        if choice in ("auto", "none", "required"):
            return choice
        if choice["type"] in ("function", "custom"):
            return {"type": "function", "function": {"name": self._shown_name(choice["name"])}}
        if choice["type"] == "allowed_tools" and self._names() <= {tool.get("name") for tool in choice["tools"]}:
            return choice["mode"]
        raise Untranslatable(f"tool_choice {choice['type']}")

    def named(self, choice: Any) -> Any:
        """Return `tool_choice` as the response repeats it, with a tool's full name."""
        if isinstance(choice, dict) and choice["type"] in ("function", "custom"):
            return choice | {"name": self._shown_name(choice["name"])}
        return choice

    def is_custom(self, name: str) -> bool:
        return name in self._custom

    def own_name(self, name: str) -> tuple[str | None, str]:
        """Return the namespace, if any, and the name that the agent knows a called tool by."""
        return self._namespaced.get(name, (None, name))

    def repeated(self) -> list[Json]:
        """Return the tools as the response repeats them."""
        return list(map(_filled, self._tools))

    def _functions(self, tool: Json) -> Iterator[tuple[str, Json]]:
        if tool["type"] not in _FIELDS:
            raise Untranslatable(f"a tool of type {tool['type']}")
        if tool["type"] == "function":
            yield tool["name"], tool
        elif tool["type"] == "custom":
            if (tool.get("format") or {}).get("type") == "grammar":
                raise Untranslatable("a custom tool with a grammar")
            yield tool["name"], {"description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}
        elif tool["type"] == "namespace":
            for inner in tool["tools"]:
                if inner["type"] == "function":
                    name = flat_name(tool["name"], inner["name"])
                    self._namespaced[name] = tool["name"], inner["name"]
                    yield name, inner

    def _shown_name(self, name: str) -> str:
        if any(tool["function"]["name"] == name for tool in self.chat):
            return name
        named = [shown for shown, (_, own) in self._namespaced.items() if own == name]
        if len(named) != 1:
            raise Untranslatable(f"tool_choice names {name}, which is no tool or several")
        return named[0]

    def _names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.chat}


def _chat_tool(name: str, function: Json) -> Json:
    shown = {key: function[key] for key in _SHOWN if function.get(key) is not None}
    return {"type": "function", "function": {"name": name, **shown}}


def _filled(tool: Json) -> Json:
    """A tool as the response repeats it."""
    inner = {"tools": list(map(_filled, tool["tools"]))} if tool["type"] == "namespace" else {}
    return dict.fromkeys(_FIELDS[tool["type"]]) | tool | inner
