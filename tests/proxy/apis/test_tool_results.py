"""Tool results in what agents send, where it is no API that says so."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.proxy.apis.tools import tool_results
from lightning_proxy.proxy.types import ToolResult

ONE = "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]"
TWO = ONE[:-1] + ", {'id': 'call_2', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2}}}]"


def smolagents(said: str, told: str) -> list[Any]:
    roles = {"assistant": said, "user": told}
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in roles.items()]


@pytest.mark.parametrize(
    ("said", "told", "found"),
    [
        (ONE, "Observation:\n3", [ToolResult("call_1", "3")]),
        (f"I add.\n{ONE}", "Observation:\n3\nNew task:\nAnd now?", [ToolResult("call_1", "3")]),
        (ONE, "Call id: call_1\nError:\nno such tool\nNow let's retry", [
            ToolResult("call_1", "no such tool\nNow let's retry", is_error=True)]),
        (TWO, "Observation:\n3\n4", []),  # which is whose?
        (ONE, "What does the Observation:\n3 mean?", []),
        ("I call no tools.", "Observation:\n3", []),
    ],
)  # fmt: skip
def test_results_that_smolagents_writes_into_texts(said: str, told: str, found: list[ToolResult]) -> None:
    assert tool_results(smolagents(said, told)) == found
    assert tool_results([*smolagents("Hello.", "Hi."), *smolagents(said, told)]) == found
