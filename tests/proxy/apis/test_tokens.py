from typing import Any

import orjson
import pytest

from lightning_proxy.proxy.apis.chat import ChatStream
from lightning_proxy.proxy.apis.inject import Injection, clean, inject
from lightning_proxy.proxy.apis.sse import encode
from lightning_proxy.proxy.apis.stream import Transcript
from lightning_proxy.proxy.apis.tokens import GREEDY, MEDIA, Tokens, can_be_imitated
from lightning_proxy.proxy.apis.tools import tool_calls, tool_results
from lightning_proxy.proxy.types import Choice, ToolCall, ToolResult

ALL = Injection(True, True, True)
DONE = encode(b"[DONE]")


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi!"},
        "logprobs": {"content": [{"token": "hi", "logprob": -0.5}, {"token": "!", "logprob": -0.25}]},
        "finish_reason": "stop",
        "token_ids": [7, 8],
    }
    choice |= changes.pop("choice", {})
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3]} | changes


def logprobs(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token": "x", "logprob": value} for value in values]}}


def chunk(delta: dict[str, Any] | None, **choice: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None} | choice]
    return {"id": "c", "object": "chat.completion.chunk", "choices": choices}


def transcript_of(*chunks: dict[str, Any], injection: Injection = ALL) -> tuple[Transcript, bytes]:
    transcript = Transcript(ChatStream(injection))
    sent = transcript.feed(b"".join(encode(orjson.dumps(c)) for c in chunks) + DONE)
    return transcript, sent


def reason(body: dict[str, Any], status: Any = "ok", **request: Any) -> str | None:
    tokens = Tokens()
    tokens.add(body)
    return tokens.untrainable_reason(status, request)


def test_ids_that_no_vocabulary_has_are_no_ids():
    assert reason(answer(choice={"token_ids": [7, 2**31]})) == "no token ids from the upstream"


def test_what_is_left_of_a_stream_is_given_out_once():
    transcript = Transcript(ChatStream(Injection()))
    assert transcript.feed(b"data: {") == b""
    assert [transcript.end(), transcript.end()] == [b"data: {", b""]


def test_an_answer_gives_its_tokens_and_is_trainable():
    tokens = Tokens()
    tokens.add(answer())
    assert tokens.prompt_token_ids == (1, 2, 3)
    assert tokens.choices == (Choice(0, (7, 8), (-0.5, -0.25), "stop"),)
    assert tokens.untrainable_reason("ok", {"temperature": 0.7}) is None


def test_a_completion_gives_its_tokens():
    values = {"token_logprobs": [-0.5, 0.0]}
    choice = {"index": 0, "text": "x", "logprobs": values, "token_ids": [7, 8], "prompt_token_ids": [1]}
    body = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    assert reason(body) == "the answer may be cut: its finish reason is None"
    choice["finish_reason"] = "stop"
    assert reason(body) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (answer(choice={"token_ids": None}), "no token ids"),
        (answer(prompt_token_ids=None), "no token ids"),
        (answer(choice={"token_ids": [1, "2"]}), "no token ids"),
        (answer(choices=[]), "no token ids"),
        ({}, "no token ids"),
        (answer(choice={"token_ids": []}), "empty"),
        (answer(choice={"token_ids": [7]}), "1 token ids but 2 log-probabilities"),
        (answer(choice={"logprobs": None}), "2 token ids but 0 log-probabilities"),
        (answer(choice=logprobs(-0.5, None)), "not a finite number"),
        (answer(choice=logprobs(-0.5, 0.1)), "not a finite number"),
        (answer(choice=logprobs(-0.5, -9999.0)), "not a finite number"),
        (answer(usage={"prompt_tokens": 3, "completion_tokens": 9}), "2 completion token ids but usage says 9"),
        (answer(usage={"prompt_tokens": 4, "completion_tokens": 2}), "3 prompt token ids but usage says 4"),
        (answer(usage=None), "no usage"),
        (answer(choices=[{"index": 0}, {"index": 1}]), "n > 1"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_says_why(body, expected):
    assert expected in (reason(body) or "")


def test_requests_and_ends_that_cannot_be_trained_on_say_why():
    assert "n > 1" in (reason(answer(), n=2) or "")
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"use_beam_search": True}):
        assert "greedy" in (reason(answer(), **greedy) or "")
    assert reason(answer(), temperature=1, top_k=2, use_beam_search=False) is None
    assert "cancelled" in (reason(answer(), status="cancelled") or "")


@pytest.mark.parametrize("asked", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_what_leaves_one_token_is_greedy(asked: dict[str, Any]):
    assert reason(answer(), **asked) == GREEDY


@pytest.mark.parametrize(
    ("asked", "because"),
    [
        ({"thinking_token_budget": 5}, "thinking budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking budget"),
        ({"watermarking": True}, "watermarking"),
        ({"vllm_xargs": {"x": 1}}, "vllm_xargs"),
    ],
)
def test_what_the_trainer_cannot_compute_again_is_left_out_by_name(asked: dict[str, Any], because: str):
    found = reason(answer(), **asked)
    assert because in (found or "")
    assert can_be_imitated(found)


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]},
    ],
)
def test_a_prompt_that_is_more_than_text_is_left_out(asked: dict[str, Any]):
    assert reason(answer(), **asked) == MEDIA
    assert not can_be_imitated(MEDIA)


def test_text_in_parts_is_trained_on():
    parts = [{"type": "text", "text": "an image"}]
    assert reason(answer(), messages=[{"role": "user", "content": parts}, {"role": "user", "content": "file"}]) is None


@pytest.mark.parametrize("odd", [None, 1, "x", [1], {"choices": 3}, {"choices": [3, {"message": 1}]}])
def test_odd_shapes_never_crash(odd):
    assert tool_calls(odd) == ()
    for body in (odd, {"choices": odd}, {"usage": odd}, {"choices": [{"index": odd, "logprobs": odd, "delta": odd}]}):
        if isinstance(body, dict):
            reason(body)
            transcript_of(body)
            clean(body, ALL)


def test_tool_calls_are_found():
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    body = answer(choice={"message": {"tool_calls": [call]}})
    assert tool_calls(body) == (ToolCall("t1", "add", '{"a": 1'),)


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        ({"type": "custom_tool_call", "name": "f", "input": "x"}, "f", "x"),
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, "shell", '{"commands":["ls"]}'),
        ({"type": "local_shell_call", "action": {"command": ["ls"]}}, "local_shell", '{"command":["ls"]}'),
        ({"type": "apply_patch_call", "operation": {"path": "a"}}, "apply_patch", '{"path":"a"}'),
        ({"type": "computer_call", "action": None, "actions": [{"type": "wait"}]}, "computer", '[{"type":"wait"}]'),
    ],
)
def test_calls_of_tools_that_the_agent_has_from_openai_are_found(item, name, arguments):
    by_the_server = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}}
    response = {"output": [by_the_server, item | {"id": "x", "call_id": "call_1"}]}
    assert tool_calls(response) == (ToolCall("call_1", name, arguments),)
    result = {"type": f"{item['type']}_output", "output": "done"}
    named = {"id": "call_1"} if item["type"] == "local_shell_call" else {"call_id": "call_1"}
    assert tool_results([result | named]) == [ToolResult("call_1", "done")]


def test_a_function_call_of_before_there_were_tools_is_a_tool_call():
    transcript, _ = transcript_of(
        chunk({"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": ""}}),
        chunk({"function_call": {"arguments": '{"a"'}}),
        chunk({"function_call": {"arguments": ": 1}"}}, finish_reason="function_call"),
    )
    assert tool_calls(transcript.response()) == (ToolCall(None, "add", '{"a": 1}'),)
    vllms = {"choices": [{"message": {"content": "hi", "function_call": None, "tool_calls": []}}]}
    assert tool_calls(vllms) == ()


def test_injection_asks_only_for_what_the_agent_did_not_ask_for():
    assert inject({}, "chat") == ({"return_token_ids": True, "logprobs": True}, Injection(True, True, False))
    assert inject({}, "completions")[0] == {"return_token_ids": True, "logprobs": 0}
    asked = {"return_token_ids": True, "logprobs": True, "stream": True, "stream_options": {"include_usage": True}}
    assert inject(asked, "chat") == (asked, Injection())
    streamed, injection = inject({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "chat")
    assert streamed["stream_options"] == {"include_usage": True}
    assert injection == ALL


@pytest.mark.parametrize(
    ("prompt", "usage"), [("a", True), ([1, 2], True), (["a"], True), ([[1, 2]], True), (["a", "b"], False)]
)
def test_the_usage_of_a_stream_is_asked_for_where_one_prompt_is_answered(prompt: object, usage: bool):
    """Without it nothing tells whether all of its tokens came, and the call is not trained on."""
    assert inject({"stream": True, "prompt": prompt}, "completions")[1] == Injection(True, True, usage)


def test_injection_leaves_what_it_would_change_the_meaning_of():
    assert inject({"echo": True}, "completions") == ({"echo": True}, Injection())
    assert inject({"top_logprobs": 2}, "chat")[1] == Injection(True, False, False)
    assert inject({"stream": True, "n": 2}, "chat")[1] == Injection(True, True, False)
    assert inject({"stream": "yes", "stream_options": 3}, "chat")[1] == Injection(True, True, False)


def test_a_stream_is_assembled_and_cleaned():
    transcript, sent = transcript_of(
        chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2, 3]},
        chunk({"content": "hi"}, token_ids=[7], **logprobs(-0.5)),
        chunk({"content": "!"}, token_ids=[8], **logprobs(-0.25)) | {"x_unknown": 1},
        chunk({}, token_ids=[9], finish_reason="stop", **logprobs(-0.125)),
        chunk(None) | {"usage": {"prompt_tokens": 3, "completion_tokens": 3}, "system_fingerprint": "fp"},
    )
    assert transcript.tokens.choices == (Choice(0, (7, 8, 9), (-0.5, -0.25, -0.125), "stop"),)
    assert transcript.tokens.untrainable_reason("ok", {}) is None
    response = transcript.response()
    assert response["object"] == "chat.completion"
    assert response["choices"][0]["message"] == {"role": "assistant", "content": "hi!"}
    assert response["choices"][0]["logprobs"] is None
    assert response["x_unknown"] == 1
    assert b"usage" not in sent and b"[7]" not in sent and b"-0.5" not in sent
    assert orjson.loads(sent.split(b"\n\n")[-2].removeprefix(b"data: "))["system_fingerprint"] == "fp"
    assert transcript.held == DONE


def test_streamed_tool_calls_are_merged_by_index():
    def call(index: int, **fields: Any) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": index} | fields]})

    transcript, _ = transcript_of(
        call(0, id="a", type="function", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"x":'}),
        call(1, id="b", type="function", function={"name": "g", "arguments": "{}"}),
        call(0, function={"arguments": "1}"}),
    )
    assert tool_calls(transcript.response()) == (ToolCall("a", "f", '{"x":1}'), ToolCall("b", "g", "{}"))


def test_a_message_beside_each_delta_is_not_counted_twice():
    pieces = [("a", "a"), ("b", "ab")]
    chunks = [chunk({"content": new}, message={"role": "assistant", "content": so_far}) for new, so_far in pieces]
    transcript, _ = transcript_of(*chunks, injection=Injection())
    assert transcript.response()["choices"][0]["message"] == {"content": "ab"}


def test_unknown_delta_fields_survive():
    transcript, _ = transcript_of(chunk({"reasoning": "so ", "mood": 1}), chunk({"reasoning": "far", "mood": 2}))
    assert transcript.response()["choices"][0]["message"] == {"reasoning": "so far", "mood": 2}


def test_chunks_that_only_carry_injected_tokens_are_not_shown():
    transcript, sent = transcript_of(chunk({}, token_ids=[7], **logprobs(-0.5)))
    assert sent == b""
    assert transcript.tokens.choices[0].token_ids == (7,)


def test_without_injection_every_byte_stays():
    raw = b': ping\r\n\r\ndata:  {"choices" : [ ] , "usage":null}\r\n\r\n'
    transcript = Transcript(ChatStream(Injection()))
    assert transcript.feed(raw) == raw
    assert transcript.feed(b"data: [DONE]\r\n\r\n") == b""
    assert transcript.held == b"data: [DONE]\r\n\r\n"


def test_garbage_and_error_events_pass_and_are_noted():
    for raw in (b"data: {garbage\n\n", b"data: 3\n\n", b'data: {"error":{"message":"no"}}\n\n'):
        transcript = Transcript(ChatStream(ALL))
        assert transcript.feed(raw) == raw
        assert transcript.error


def test_a_held_chunk_is_sent_when_the_stream_breaks():
    transcript = Transcript(ChatStream(ALL))
    finish = chunk({"content": "x"}, finish_reason="stop", token_ids=[1])
    assert transcript.feed(encode(orjson.dumps(finish))) == b""
    assert b'"finish_reason":"stop"' in transcript.end()
    assert not transcript.ended
