"""Tool calls of any server's chat stream, in answers of /v1/messages and /v1/responses through the chat route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_proxy.proxy.apis.as_chat.dialect import ThroughChat
from lightning_proxy.proxy.apis.as_chat.messages import MessagesTranslator
from lightning_proxy.proxy.apis.as_chat.regular_calls import RegularCalls
from lightning_proxy.proxy.apis.as_chat.responses import ResponsesTranslator
from lightning_proxy.proxy.apis.inject import Injection
from lightning_proxy.proxy.apis.messages import MessagesApi
from lightning_proxy.proxy.apis.responses import ResponsesApi
from lightning_proxy.proxy.apis.stream import Transcript
from lightning_proxy.proxy.apis.tools import tool_calls
from support.cases import Case, cases_with
from support.streams.pieces import TOP, USAGE, frame
from support.streams.tool_calls import TOOL_CALLS

# Not of one choice, called as tools are; and what a stream cannot put in order any more.
LEFT_OUT = {
    "custom_tool",
    "function_call",
    "function_call_object",
    "several_choices",
    "calls_in_a_last_message",
    "name_in_pieces",
    "indexes_backwards",
}
CASES = [c for c in [*cases_with("stream", "tool_calls"), *TOOL_CALLS] if c["path"].endswith("chat/completions")]
CASES = [case for case in CASES if case["name"] not in LEFT_OUT]
COUNTED = frame(TOP | {"choices": [], "usage": USAGE})
MESSAGES = (
    MessagesApi(),
    MessagesTranslator(),
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]},
)
RESPONSES = ResponsesApi(), ResponsesTranslator(), {"model": "m", "input": "go"}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
@pytest.mark.parametrize("api", [MESSAGES, RESPONSES], ids=["messages", "responses"])
def test_the_agent_gets_the_calls_of_the_same_answer_without_streaming(case: Case, api: Any) -> None:
    own, translator, body = api
    chat = ThroughChat(own, translator.request(body | {"stream": True}))
    transcript = Transcript(chat.stream(Injection()))
    *events, done = case["stream"]
    sent = b"".join(transcript.feed(event.encode()) for event in [*events, COUNTED, done])
    assert transcript.held
    found = [(call.id, call.name, json.loads(call.arguments)) for call in tool_calls(transcript.response())]
    expected = [(call_id, name, json.loads(said)) for call_id, name, said in case["tool_calls"]]
    assert [call[1:] for call in found] == [call[1:] for call in expected], sent
    assert [a[0] for a, b in zip(found, expected, strict=True) if b[0]] == [b[0] for b in expected if b[0]]


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
        {"id": "c1", "model": "m", "created": 1, "choices": [choice], "usage": USAGE}, Injection()
    )
    assert [(c.id, c.name, c.arguments) for c in tool_calls(answer)] == [("call_a", "f", '{"a":1}')]
