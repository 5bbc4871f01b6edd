"""Reads tool calls in answers, and their results in later requests, for all recorded APIs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

from .json_text import dumps
from .records import ToolCall, ToolResult

Json = dict[str, Any]

# smolagents writes calls and results into texts: an assistant's, with the calls' ids, and then a user's.
_WRITTEN_CALL = re.compile(r"\{'id': '([^']+)', 'type': 'function'")
_WRITTEN_RESULT = re.compile(r"(?:Call id: .*\n)?(Observation|Error):\n")

# Where an item of Responses has its arguments: of functions, custom tools, the computer, the shell, patches.
_ARGUMENTS = ("arguments", "input", "action", "actions", "operation")


def conversation(request: Json) -> list[Any]:
    """Return the list that a request resends and extends every turn: `messages`, the items of `input`, or empty."""
    found = request.get("messages", request.get("input"))
    return found if isinstance(found, list) else []


def tool_calls(response: Any) -> tuple[ToolCall, ...]:
    """Return the tool calls of all choices of an answer, in order. A streamed answer must be assembled first."""
    if not isinstance(response, dict):
        return ()
    where = (("choices", _of_chat), ("output", _of_responses), ("content", _of_messages))
    return tuple(call for name, calls in where if name in response for call in calls(response))


def results_in(item: Any) -> Iterator[ToolResult]:
    """Yield the results in one message: chat's `tool` and `function`, `…_call_output`, Anthropic's `tool_result`."""
    if not isinstance(item, dict):
        return
    if (role := item.get("role")) in ("tool", "function"):
        name = _text(item.get("name"))
        yield ToolResult(_text(item.get("tool_call_id")) or None, item.get("content"), name=name)
    elif str(item.get("type")).endswith("_call_output"):
        yield ToolResult(_text(answered_call(item)) or None, item.get("output"))
    elif role == "user":
        for block in dicts(item.get("content")):
            if block.get("type") == "tool_result":
                called = _text(block.get("tool_use_id")) or None
                yield ToolResult(called, block.get("content"), block.get("is_error") is True)


def item_ids(response: Any) -> list[str | None]:
    """Return the ids of the items that are an answer's tool calls, in order; Responses alone has such ids."""
    output = response.get("output") if isinstance(response, dict) else None
    return [_text(item.get("id")) for item in dicts(output) if is_call(item)]


def _of_chat(response: Json) -> Iterator[ToolCall]:
    for choice in dicts(response.get("choices")):
        message = choice.get("message")
        message = message if isinstance(message, dict) else {}
        for call in dicts(message.get("tool_calls")):
            yield _function_call(call.get("id"), called_tool(call))
        if isinstance(called := message.get("function_call"), dict):  # of OpenAI's API before there were tools
            yield _function_call(None, called)


def called_tool(call: Json) -> Any:
    """Return the function or custom tool of a chat tool call."""
    return call.get("custom") if call.get("function") is None else call["function"]


def _function_call(call_id: Any, function: Any) -> ToolCall:
    function = function if isinstance(function, dict) else {}
    return ToolCall(_text(call_id), _text(function.get("name")) or "", call_arguments(function))


def _of_responses(response: Json) -> Iterator[ToolCall]:
    for item in dicts(response.get("output")):
        if is_call(item):
            yield ToolCall(_text(item.get("call_id")), call_name(item), call_arguments(item))


def call_name(item: Json) -> str:
    """Return the name of the tool that an item of Responses calls; of OpenAI's own tools, the item's type."""
    return _text(item.get("name")) or str(item["type"]).removesuffix("_call")


def is_call(item: Json) -> bool:
    """Return whether an item of Responses is a call that the agent makes, such as one of its own tools.

    Those have a `call_id`; calls that the server makes itself have none.
    """
    kind = item.get("type")
    return kind in ("function_call", "custom_tool_call") or (
        isinstance(kind, str) and kind.endswith("_call") and isinstance(item.get("call_id"), str)
    )


def answered_call(item: Json) -> Any:
    """Return the `call_id` that a result belongs to; OpenAI's local shell names this field `id`."""
    return item.get("call_id", item.get("id"))


def call_arguments(item: Json) -> str:
    """Return the arguments as the model wrote them, or as the server parsed them; empty if there are none."""
    value = next((item[name] for name in _ARGUMENTS if item.get(name) is not None), "")
    return value if isinstance(value, str) else dumps(value)


def _of_messages(response: Json) -> Iterator[ToolCall]:
    for block in dicts(response.get("content")):
        if block.get("type") == "tool_use":
            value = block.get("input")
            if isinstance(value, dict) and [*value] == ["INVALID_JSON"]:  # so Anthropic and vLLM wrap a text
                value = value["INVALID_JSON"]
            arguments = value if isinstance(value, str) else dumps(value)
            yield ToolCall(_text(block.get("id")), _text(block.get("name")) or "", arguments)


def written_results(items: Sequence[Any]) -> Iterator[ToolResult]:
    """Yield the results that smolagents writes into a text, where that is the result of one call only."""
    for answer, reply in pairwise(items):
        _, calling, calls = _words(answer, "assistant").rpartition("Calling tools:\n")
        ids = _WRITTEN_CALL.findall(calls) if calling else []
        text = _words(reply, "user") if len(ids) == 1 else ""
        if begin := _WRITTEN_RESULT.match(text):
            content, _, _ = text[begin.end() :].partition("\nNew task:\n")
            yield ToolResult(ids[0], content, begin[1] == "Error")


def _words(item: Any, role: str) -> str:
    """The text of a message of this role; none for any other item."""
    if not isinstance(item, dict) or item.get("role") != role:
        return ""
    content = item.get("content")
    parts = [content] if isinstance(content, str) else [part.get("text") for part in dicts(content)]
    return "\n".join(part for part in parts if isinstance(part, str))


def dicts(value: Any) -> list[Json]:
    """Return the objects in a value that should be a list of objects."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def has_results(items: Sequence[Any], known: int) -> bool:
    """Return whether there are results after the first `known` messages or items."""
    return brings_result(items[known:]) or next(written_results(items[max(known - 1, 0) :]), None) is not None


def only_results(items: Sequence[Any]) -> bool:
    """Return whether messages or items are at most one answer, and then nothing but tools' results, at least one."""
    answer = [*takewhile(_is_answer, items)]
    results = items[len(answer) :]
    is_one = sum(item.get("role") == "assistant" for item in answer) <= 1
    return is_one and bool(results) and all(map(_is_result, results))


def _is_result(item: Any) -> bool:
    """Whether an item has a tool's result and nothing beside it, as a user's message of Anthropic may have."""
    return brings_result([item]) and (
        item.get("role") != "user" or all(block.get("type") == "tool_result" for block in dicts(item["content"]))
    )


def _is_answer(item: Any) -> bool:
    return isinstance(item, dict) and (
        item.get("role") == "assistant" or item.get("type") == "reasoning" or is_call(item)
    )


def brings_result(items: Iterable[Any]) -> bool:
    """Return whether any message or item is, or has, a tool's result."""
    return any(True for item in items for _ in results_in(item))
