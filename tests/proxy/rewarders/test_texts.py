"""What agents send becomes texts for judges, whatever its shape, and in time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_proxy.proxy.rewarders.next_message import replies
from lightning_proxy.proxy.rewarders.texts import messages_of

USER = {"role": "user", "content": "x"}


def call(n: int, messages: Any, answer: Any) -> dict[str, Any]:
    return {
        "call_id": f"c{n}", "endpoint": "chat/completions", "status": "ok", "superseded_by": None,
        "request": {"messages": messages}, "response": {"choices": [{"message": answer}]},
    }  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": ["x"]},
        {"role": "assistant", "tool_calls": {"a": 1}},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": "x"}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "x"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": {"a": 1}, "arguments": "{}"}}]},
        {"role": ["a"], "content": "x"},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": [None, {"type": "text", "text": None}]},
    ],
)
def test_messages_of_any_shape_are_shown(message: dict[str, Any]) -> None:
    rollout = {"calls": [call(1, [USER], message), call(2, [USER, message, USER], message)]}
    assert len(messages_of(rollout)) >= 3
    assert len([*replies(rollout)]) <= 1


def test_a_long_conversation_takes_no_time_for_each_of_its_beginnings() -> None:
    def took(n: int) -> float:
        calls, history = [], [USER]
        for i in range(n):
            answer = {"role": "assistant", "content": f"{i} " + "word " * 500}
            calls.append(call(i, history, answer))
            history = [*history, answer, {"role": "user", "content": f"{i} " + "more " * 500}]
        begun = time.process_time()
        assert len(messages_of({"calls": calls})) == 2 * n
        return time.process_time() - begun

    took(50)
    assert took(400) < 16 * took(100), "4 times as long"
