"""Makes chat tools of those of Responses, and translates the names that the model used back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .responses_items import CUSTOM_INPUT, flat_name
from .translation import Untranslatable

Json = dict[str, Any]

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
