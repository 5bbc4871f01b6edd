from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.proxy.dialects.as_chat.responses import ResponsesTranslator
from lightning_proxy.proxy.dialects.as_chat.translation import Template, Untranslatable

Json = dict[str, Any]

SAY = {"role": "user", "content": "add"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "prompt_tokens_details": None}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
MESSAGES: list[Json] = [
    {"content": "hi"},
    {"reasoning": "so", "content": "hi"},
    {"reasoning": "so", "content": "hi", "tool_calls": [CALL, CALL | {"id": "call_2"}]},
    {"tool_calls": [CALL]},
    {"reasoning": "so", "tool_calls": [CALL]},
]


def asked(earlier: Any = (), **body: Any) -> Json:
    """The chat request."""
    return ResponsesTranslator({"model": "m", "input": [SAY]} | body).chat(Template(), earlier)


def events(**body: Any) -> ResponsesTranslator:
    return ResponsesTranslator({"model": "m", "input": [SAY]} | body)


def chat(message: Json, finish: str = "stop") -> Json:
    choice = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": finish}
    return {"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice], "usage": USAGE}


def chunks(message: Json) -> list[Json]:
    """As vLLM sends a message to who asks for token ids: also where its parser holds text back."""
    deltas: list[Json] = [{"role": "assistant", "content": ""}, {}]
    deltas += [{name: letter} for name in ("reasoning", "content") for letter in message.get(name) or ""]
    for index, call in enumerate(message.get("tool_calls") or ()):
        deltas.append({"tool_calls": [call | {"index": index, "function": call["function"] | {"arguments": ""}}]})
        deltas += [{}, {"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]}]
    top = {"id": "chatcmpl-1", "created": 7, "model": "m"}
    told = [top | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    told[-1]["choices"][0]["finish_reason"] = "stop"
    return [*told, top | {"choices": [], "usage": USAGE}]


def streamed(stream: ResponsesTranslator, chunks: list[Json]) -> list[Json]:
    return [event for chunk in chunks for event in stream.feed(chunk)] + list(stream.end())


def test_an_answer_that_comes_back_is_the_message_that_was_said() -> None:
    for message in MESSAGES:
        said = {"role": "assistant"} | message
        answers = [events(tools=[ADD]).answer(chat(message))]
        answers.append(streamed(events(tools=[ADD]), chunks(message))[-1]["response"])
        for answer in answers:
            assert ResponsesTranslator.history(answer) == said
            assert asked(input=[SAY, *answer["output"], RESULT])["messages"][1] == said
            later = asked([SAY, *answer["output"]], input=[RESULT], previous_response_id=answer["id"])
            assert later["messages"] == [SAY, said, {"role": "tool", "tool_call_id": "call_1", "content": "1"}]


def test_a_stream_ends_with_the_whole_answer() -> None:
    for message in MESSAGES:
        whole = events(request_id="r", tools=[ADD]).answer(chat(message))
        last = streamed(events(request_id="r", tools=[ADD]), chunks(message))[-1]
        assert last["type"] == "response.completed"
        for item in (*whole["output"], *last["response"]["output"]):
            del item["id"]
            item["status"] = "completed"  # vLLM's whole answers leave that of reasoning out
        assert last["response"] == whole


def test_earlier_instructions_are_gone_and_earlier_system_messages_are_not() -> None:
    earlier = [{"role": "system", "content": "Be kind."}, SAY, {"role": "assistant", "content": "hi"}]
    later = asked(earlier, previous_response_id="resp_1", instructions="Be brief.")
    roles = [(message["role"], message["content"]) for message in later["messages"]]
    assert roles == [
        ("system", "Be brief."), ("system", "Be kind."), ("user", "add"), ("assistant", "hi"), ("user", "add")
    ]  # fmt: skip


def test_all_of_a_message_stays_in_the_history() -> None:
    """vLLM keeps the first part, and fails on a refusal."""
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    refusal = [{"type": "refusal", "refusal": "No."}]
    items = [{"type": "message", "role": "assistant", "content": content} for content in (parts, refusal)]
    assert [m["content"] for m in asked(input=[*items, SAY])["messages"]] == ["ab", "No.", "add"]


def test_text_after_a_call_belongs_to_the_same_message() -> None:
    """A chat message has all of its text before its calls."""
    text = {"type": "message", "role": "assistant", "content": "b"}
    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
    (_, said) = asked(input=[SAY, text | {"content": "a"}, call, text])["messages"]
    assert said == {"role": "assistant", "content": "ab", "tool_calls": [CALL]}


def test_an_item_may_be_referred_to() -> None:
    earlier = [SAY | {"id": "msg_1"}, {"role": "assistant", "content": "hi", "id": "msg_2"}]
    later = asked(earlier, previous_response_id="r", input=[{"type": "item_reference", "id": "msg_1"}])
    assert later["messages"][-1] == SAY
    with pytest.raises(Untranslatable, match="unknown item"):
        asked(earlier, previous_response_id="r", input=[{"type": "item_reference", "id": "msg_3"}])


def test_a_limit_is_told_also_where_chat_only_tells_of_calls() -> None:
    cut = events(tools=[ADD], max_output_tokens=5).answer(chat({"tool_calls": [CALL]}, "tool_calls"))
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_what_chat_cannot_do_is_left_to_its_own_route() -> None:
    bodies: list[Json] = [
        {"background": True},
        {"input": []},
        {"input": [{"type": "mcp_call", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        {"previous_response_id": "resp_1"},
        {"tools": [ADD], "tool_choice": {"type": "web_search_preview"}},
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}, "structured_outputs": {"choice": ["a"]}},
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
    ]
    for body in bodies:
        with pytest.raises(Untranslatable):
            asked(**body)
