"""Tool calls of any server's chat stream, in answers of /v1/messages and /v1/responses through the chat route."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.proxy.apis.as_chat.dialect import ThroughChat
from lightning_proxy.proxy.apis.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.apis.as_chat.regular_calls import RegularCalls
from lightning_proxy.proxy.apis.as_chat.responses import ResponsesTranslator
from lightning_proxy.proxy.apis.inject import Injection
from lightning_proxy.proxy.apis.messages import MessagesApi
from lightning_proxy.proxy.apis.responses import ResponsesApi
from lightning_proxy.proxy.apis.tools import tool_calls

MESSAGES = (
    MessagesApi(),
    MessagesTranslator(),
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]},
)
RESPONSES = ResponsesApi(), ResponsesTranslator(), {"model": "m", "input": "go"}


def test_regular_calls_go_on_piece_by_piece_as_they_come() -> None:
    def chunk(*pieces: Any, finish: str | None = None) -> Any:
        return {"choices": [{"index": 0, "delta": {"tool_calls": list(pieces)}, "finish_reason": finish}]}

    def first(index: int) -> Any:
        function = {"name": "f", "arguments": ""}
        return {"index": index, "id": f"call_{index}", "type": "function", "function": function}

    def more(index: int, text: str) -> Any:
        return {"index": index, "function": {"arguments": text}}

    regular = RegularCalls()
    chunks = [
        chunk(first(0)), chunk(more(0, '{"a"')), chunk(more(0, ": 1}"), first(1)), chunk(more(1, "{")),
        chunk(more(1, "}")),
    ]  # fmt: skip
    assert [regular.chunk(c) for c in chunks] == chunks
    end = chunk(finish="tool_calls")
    assert regular.chunk(end)["choices"][0]["delta"] == {}
    assert regular.rest() == []


@pytest.mark.parametrize("api", [MESSAGES, RESPONSES], ids=["messages", "responses"])
def test_arguments_of_a_whole_answer_may_be_an_object(api: Any) -> None:
    own, translator, body = api
    call = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "tool_calls"}
    answer = ThroughChat(own, translator.request(body)).agents(
        {
            "id": "c1",
            "model": "m",
            "created": 1,
            "choices": [choice],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
        },
        Injection(),
    )
    assert [(c.id, c.name, c.arguments) for c in tool_calls(answer)] == [("call_a", "f", '{"a":1}')]
