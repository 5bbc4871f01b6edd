"""Tool calls in answers and their results in later requests, in the shapes of all recorded APIs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from lightning_proxy.proxy.types import ToolCall, ToolResult

Json = dict[str, Any]


def conversation(request: Json) -> list[Any]:
    """What a request sends again and adds to at every turn: `messages`, or the items of `input`; empty without one."""
    found = request.get("messages", request.get("input"))
    return found if isinstance(found, list) else []


def tool_calls(response: Any) -> tuple[ToolCall, ...]:
    """The tool calls in an answer (a streamed one: assembled), in order, of all its choices."""
    if not isinstance(response, dict):
        return ()
    return (*_of_chat(response), *_of_responses(response), *_of_messages(response))


def tool_results(items: Sequence[Any]) -> list[ToolResult]:
    """Results that an agent sends back: chat's role `tool`, Responses' `…_call_output`, Anthropic's `tool_result`."""
    return [result for item in items if isinstance(item, dict) for result in _results(item)]


def _of_chat(response: Json) -> Iterator[ToolCall]:
    for choice in dicts(response.get("choices")):
        message = choice.get("message")
        for call in dicts(message.get("tool_calls")) if isinstance(message, dict) else ():
            function = call.get("function")
            function = function if isinstance(function, dict) else {}
            yield ToolCall(
                _text(call.get("id")), _text(function.get("name")) or "", _text(function.get("arguments")) or ""
            )


def _of_responses(response: Json) -> Iterator[ToolCall]:
    for item in dicts(response.get("output")):
        if item.get("type") in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments", item.get("input"))
            yield ToolCall(_text(item.get("call_id")), _text(item.get("name")) or "", _text(arguments) or "")


def _of_messages(response: Json) -> Iterator[ToolCall]:
    for block in dicts(response.get("content")):
        if block.get("type") == "tool_use":
            arguments = orjson.dumps(block.get("input")).decode()
            yield ToolCall(_text(block.get("id")), _text(block.get("name")) or "", arguments)


def _results(item: Json) -> Iterator[ToolResult]:
    if item.get("role") == "tool" and isinstance(call_id := item.get("tool_call_id"), str):
        yield ToolResult(call_id, item.get("content"))
    elif str(item.get("type")).endswith("_call_output") and isinstance(call_id := item.get("call_id"), str):
        yield ToolResult(call_id, item.get("output"))
    elif item.get("role") == "user":
        for block in dicts(item.get("content")):
            if block.get("type") == "tool_result" and isinstance(call_id := block.get("tool_use_id"), str):
                yield ToolResult(call_id, block.get("content"), block.get("is_error") is True)


def dicts(value: Any) -> Iterator[Json]:
    """The objects in what should be a list of them."""
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
