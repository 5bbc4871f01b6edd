"""Automatic intermediate rewards: what the proxy saw happen in a call is worth its weight, and nothing else is."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_proxy.core.config.trainer import AirEvent
from lightning_proxy.core.records import Choice, ModelCall, ToolCall
from lightning_proxy.core.tools import results_in
from lightning_proxy.trainer.credit.air import air_rewards
from support.calls import call

ON: dict[AirEvent, float] = {"tool_error": -1.0, "bad_arguments": -10.0, "repeated_call": -100.0, "truncated": -1000.0}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "required": ["n"]}
CHAT = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}


def made(*tools: ToolCall, request: dict[str, Any] = CHAT, call_id: str = "a", **changed: Any) -> ModelCall:
    return call(call_id, tool_calls=tools, request=request, **changed)


def tool(arguments: str, name: str = "f", is_error: bool | None = None) -> ToolCall:
    return ToolCall("t", name, arguments, is_error=is_error)


def reward(*calls: ModelCall) -> dict[str, float]:
    return air_rewards(calls, ON)


def test_tool_errors_and_truncation_count() -> None:
    assert reward(made(tool('{"n": 1}', is_error=True), tool('{"n": 2}', is_error=True))) == {"a": -2.0}
    assert reward(made(choices=(Choice(0, finish_reason="length"),))) == {"a": -1000.0}


@pytest.mark.parametrize(
    ("content", "is_error"),
    [
        ("Error: no such city\n Please fix your mistakes.", True),  # LangGraph, AG2, Agent Framework
        ("\nError executing tool. coworker mentioned not found", True),  # CrewAI
        ("ValueError: n must be at least 0", True),
        ("Traceback (most recent call last):\n  File", True),
        ('{"error": "no such city"}', True),
        ('{"isError": true, "content": []}', True),
        ([{"type": "text", "text": "Error: no such city"}], True),
        ('{"error": null, "rows": 3}', False),
        ('{"error', False),
        ("Errors and how to handle them", False),
        ("42", False),
        (None, False),
    ],
)
def test_an_api_without_a_flag_for_errors_has_them_in_words(content: Any, is_error: bool) -> None:
    (result,) = results_in({"role": "tool", "tool_call_id": "t", "content": content})
    sent_back = replace(tool('{"n": 1}'), result=result.content, is_error=result.is_error)
    assert reward(made(sent_back)) == ({"a": -1.0} if is_error else {})


@pytest.mark.parametrize("arguments", ["{", "[1]", '"n"', "{}", "", '{"n": -1}', '{"n": "1"}', '{"n": 1} and more'])
def test_arguments_that_do_not_parse_or_match_the_schema_count(arguments: str) -> None:
    assert reward(made(tool(arguments))) == {"a": -10.0}


def test_schemas_are_found_in_the_requests_of_every_api() -> None:
    for offered in (
        CHAT["tools"][0],
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"name": "f", "input_schema": SCHEMA},
        {"type": "custom", "name": "f", "input_schema": SCHEMA},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    ):
        assert reward(made(tool('{"n": 1}'), request={"tools": [offered]})) == {}
        assert reward(made(tool('{"n": -1}'), request={"tools": [offered]})) == {"a": -10.0}
    for free in ({"type": "custom", "name": "f"}, {"type": "custom", "custom": {"name": "f"}}):
        assert reward(made(tool("any text"), request={"tools": [free]})) == {}


UNUSABLE: list[Any] = [
    {"type": "no such type"}, {"$ref": "http://127.0.0.1:9/schema.json"}, {"$ref": "#"}, {"$ref": "#/nowhere"},
    {"properties": {"n": {"pattern": "("}}}, {"properties": {"n": {"pattern": "a{99999999999}"}}},
    {"$schema": "http://["}, None, 7,
]  # fmt: skip


@pytest.mark.parametrize("schema", UNUSABLE)
def test_a_schema_that_cannot_be_used_allows_every_object(schema: Any) -> None:
    request = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    assert reward(made(tool('{"n": "x"}'), request=request)) == {}


def test_the_same_call_again_counts_however_its_arguments_are_written() -> None:
    first, second = '{"a": 1, "b": 2}', '{"b":2, "a":1}'
    used = ([tool(first, "g")], [tool(second, "g"), tool(first, "h")], [tool(first, "g")])
    calls = [made(*tools, request={"tools": []}, call_id=str(i)) for i, tools in enumerate(used)]
    assert reward(*calls) == {"1": -100.0, "2": -100.0}
