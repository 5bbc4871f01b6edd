"""Reads tool calls and tool results from messages and answers of all recorded APIs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

from .json_text import dumps
from .records import ToolCall, ToolResult

Json = dict[str, Any]

# smolagents writes calls and results into texts: an assistant's, with the calls' ids, and then a user's.
_WRITTEN_CALL = re.compile(r"\{'id': '([^']+)', 'type': 'function'")
_WRITTEN_RESULT = re.compile(r"(?:Call id: .*\n)?(Observation|Error):\n")

# Where a call has its arguments: of functions, custom tools and Messages, the computer, the shell, patches.
_ARGUMENTS = ("arguments", "input", "action", "actions", "operation")


def conversation(request: Json) -> list[Any]:
    """Return the list that a request resends and extends every turn: `messages`, or the items of `input`; else []."""
    found = request.get("messages", request.get("input"))
    return found if isinstance(found, list) else []


def answers(response: Any) -> list[list[Json]]:
    """Return each choice of an answer as the messages or items that a later request may send back.

    A streamed answer must be assembled first.
    """
    if not isinstance(response, dict):
        return []
    if isinstance(output := response.get("output"), list):
        return [dicts(output)]
    if isinstance(content := response.get("content"), list):
        return [[{"role": "assistant", "content": content}]]
    choices = dicts(response.get("choices"))
    messages = [choice.get("message", {"content": choice.get("text")}) for choice in choices]
    return [[{"role": "assistant"} | message] for message in dicts(messages)]


def tool_calls(response: Any) -> tuple[ToolCall, ...]:
    """Return the tool calls of all choices of an answer, in order."""
    return tuple(call for answer in answers(response) for item in answer for call in calls_in(item))


def calls_in(item: Any) -> Iterator[ToolCall]:
    """Yield the tool calls in a message of chat or Messages, or in an item of Responses."""
    if not isinstance(item, dict):
        return
    if is_call(item):
        yield _call(item.get("call_id"), item, item["type"].removesuffix("_call"))  # OpenAI's own tools have no name
        return
    for call in dicts(item.get("tool_calls")):
        yield _call(call.get("id"), call.get("custom") if call.get("function") is None else call["function"])
    if isinstance(called := item.get("function_call"), dict):  # OpenAI's API before it had tools
        yield _call(None, called)
    for block in dicts(item.get("content")):
        if block.get("type") == "tool_use":
            yield _call(block.get("id"), block)


def _call(call_id: Any, function: Any, name: str = "") -> ToolCall:
    """The tool call. Its arguments are the model's text, or JSON of what the server parsed; "" if there are none."""
    function = function if isinstance(function, dict) else {}
    value = next((function[where] for where in _ARGUMENTS if function.get(where) is not None), "")
    if isinstance(value, dict) and [*value] == ["INVALID_JSON"]:  # as Anthropic and vLLM wrap invalid JSON
        value = value["INVALID_JSON"]
    arguments = value if isinstance(value, str) else dumps(value)
    return ToolCall(_text(call_id), _text(function.get("name")) or name, arguments)


def is_call(item: Json) -> bool:
    """Return whether an item of Responses is a tool call that the agent carries out.

    These have a `call_id`; tool calls that the server carries out have none.
    """
    kind = item.get("type")
    return kind in ("function_call", "custom_tool_call") or (
        isinstance(kind, str) and kind.endswith("_call") and isinstance(item.get("call_id"), str)
    )


def results_in(item: Any) -> Iterator[ToolResult]:
    """Yield the tool results in a message or item of any recorded API."""
    if not isinstance(item, dict):
        return
    if (role := item.get("role")) in ("tool", "function"):
        yield ToolResult(_text(item.get("tool_call_id")) or None, item.get("content"))
    elif "type" in item and str(item["type"]).endswith("_call_output"):
        called = item.get("call_id", item.get("id"))  # OpenAI's local shell names this field `id`
        yield ToolResult(_text(called) or None, item.get("output"))
    elif role == "user" and isinstance(content := item.get("content"), list):
        for block in dicts(content):
            if block.get("type") == "tool_result":
                called = _text(block.get("tool_use_id")) or None
                yield ToolResult(called, block.get("content"), block.get("is_error") is True)


def written_results(items: Sequence[Any]) -> Iterator[tuple[int, ToolResult]]:
    """Yield the results that smolagents writes as text, if the text is the result of a single call.

    Each is paired with the index of the answer that made the call.
    """
    for place, (answer, reply) in enumerate(pairwise(items)):
        if begin := _WRITTEN_RESULT.match(text := _words(reply, "user")):
            _, calling, calls = _words(answer, "assistant").rpartition("Calling tools:\n")
            ids = _WRITTEN_CALL.findall(calls) if calling else []
            if len(ids) == 1:
                content, _, _ = text[begin.end() :].partition("\nNew task:\n")
                yield place, ToolResult(ids[0], content, begin[1] == "Error")


def _words(item: Any, role: str) -> str:
    """The text of a message with this role; empty for any other item."""
    if not isinstance(item, dict) or item.get("role") != role:
        return ""
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in dicts(content)]
    return "\n".join(part for part in parts if isinstance(part, str))


def dicts(value: Any) -> list[Json]:
    """Return the dicts in a value that should be a list of dicts."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def has_results(items: Sequence[Any], known: int) -> bool:
    """Return whether there are results after the first `known` messages or items."""
    written = written_results(items[max(known - 1, 0) :])
    return any(map(brings_result, items[known:])) or next(written, None) is not None


def only_results(items: Sequence[Any]) -> bool:
    """Return whether messages or items are at most one answer, then one or more tool results and nothing else."""
    answer = [*takewhile(is_answer, items)]
    results = items[len(answer) :]
    is_one = sum(item.get("role") == "assistant" for item in answer) <= 1
    return is_one and bool(results) and all(map(_is_result, results))


def _is_result(item: Any) -> bool:
    """Whether an item has tool results and nothing else, as Anthropic's user messages may."""
    return brings_result(item) and (
        item.get("role") != "user" or all(block.get("type") == "tool_result" for block in dicts(item["content"]))
    )


def is_answer(item: Any) -> bool:
    """Return whether a message or item comes from the model."""
    return isinstance(item, dict) and (
        item.get("role") == "assistant" or item.get("type") == "reasoning" or is_call(item)
    )


def brings_result(item: Any) -> bool:
    """Return whether a message or item is or contains a tool result."""
    return next(results_in(item), None) is not None
