"""CONTRACT.md, section 4: what cannot be trained on is recorded with the reason, and the agent's request succeeds."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from typing import Any

import pytest

from contract.scripted import ASKED, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Json, Scripted, Wire, said, user

GO = [user("go")]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def logprobs(*values: Any) -> Json:
    return {"logprobs": {"content": [{"token": "x", "logprob": value} for value in values]}}


def answer(choice: Json | None = None, **fields: Any) -> Json:
    """A chat's answer as vLLM gives it, with these changes."""
    made = {"index": 0, "message": said("hi!"), "finish_reason": "stop", "token_ids": [7, 8], **logprobs(-0.5, -0.25)}
    top = {"id": "c1", "object": "chat.completion", "created": 1, "model": "base", "usage": USAGE}
    return top | {"choices": [made | (choice or {})], "prompt_token_ids": [1, 2, 3]} | fields


def wire(body: Any, stream: bool = False) -> Wire:
    """The answer whole, or as events that say the same."""
    if not stream:
        return Wire([json.dumps(body).encode()], "application/json")
    choices = [{k: v for k, v in one.items() if k != "message"} | {"delta": said("hi!")} for one in body["choices"]]
    chunks = [body | {"choices": choices, "usage": None}, body | {"choices": [], "usage": body["usage"]}]
    return Wire([*(f"data: {json.dumps(one)}\n\n".encode() for one in chunks), b"data: [DONE]\n\n"])


def call_of(model: Scripted, body: Any, path: str = CHAT, stream: bool = False, /, **request: Any) -> Json:
    """Ask the policy, have this answered, see that the agent is, and return the call's record."""
    asked, rollout = {"model": "policy", "stream": stream} | ASKED[path] | request, uuid.uuid4().hex
    model.ask(f"/rollouts/{rollout}{path}", asked, wire(body, stream))
    call: Json
    (call,) = model.proxy.rollout(rollout)["calls"]
    assert call["status"] == "ok" and call["trainable"] is (call["untrainable_reason"] is None)
    return call


@pytest.mark.parametrize("stream", [False, True])
def test_an_answers_tokens_are_recorded_in_each_dialect(stream: bool, model: Scripted) -> None:
    for path in (CHAT, MESSAGES, RESPONSES):
        call = call_of(model, answer(), path, stream, temperature=0.7)
        assert (call["prompt_token_ids"], call["response_token_ids"]) == ([1, 2, 3], [7, 8]), path
        assert (call["logprobs"], call["trainable"], call["policy_version"]) == ([-0.5, -0.25], True, 0)
        assert call["policy_versions"] == [0] and call["request"]["temperature"] == 0.7


@pytest.mark.parametrize("stream", [False, True])
def test_a_completions_tokens_are_recorded(stream: bool, model: Scripted) -> None:
    choice = {"index": 0, "text": "x", "finish_reason": "stop", "token_ids": [7, 8], "prompt_token_ids": [1, 2, 3]}
    body = {"id": "c1", "usage": USAGE, "choices": [choice | {"logprobs": {"token_logprobs": [-0.5, 0.0]}}]}
    call = call_of(model, body, COMPLETIONS, stream)
    assert (call["prompt_token_ids"], call["response_token_ids"]) == ([1, 2, 3], [7, 8])
    assert (call["logprobs"], call["trainable"]) == ([-0.5, 0.0], True)


def test_an_answer_that_may_be_cut_says_so(model: Scripted) -> None:
    assert "may be cut" in call_of(model, answer({"finish_reason": None}))["untrainable_reason"]
    assert call_of(model, answer({"finish_reason": "length"}))["trainable"], "to the agent's own limit"


def test_an_answer_of_any_shape_reaches_the_agent_and_the_record(model: Scripted) -> None:
    for body in (None, 1, "x", [1], {}, {"choices": 3}, {"choices": [3, {"message": 1}]}, {"usage": [1]}):
        rollout = uuid.uuid4().hex
        got = model.ask(f"/rollouts/{rollout}{CHAT}", {"model": "policy", "messages": GO}, wire(body))
        assert got.json == body
        (call,) = model.proxy.rollout(rollout)["calls"]
        assert (call["trainable"], call["response"]) == (False, body) and call["untrainable_reason"]


def test_a_chunk_that_holds_only_what_the_proxy_asked_for_is_not_shown(model: Scripted) -> None:
    def chunk(delta: Json, token: int, **more: Any) -> bytes:
        one = {"index": 0, "delta": delta, "token_ids": [token], "finish_reason": None, **logprobs(-0.5)} | more
        return f"data: {json.dumps({'id': 'c1', 'choices': [one], 'prompt_token_ids': [1, 2, 3]})}\n\n".encode()

    usage = f"data: {json.dumps({'id': 'c1', 'choices': [], 'usage': USAGE})}\n\n".encode()
    pieces = [chunk({}, 7), chunk({"content": "hi"}, 8, finish_reason="stop"), usage, b"data: [DONE]\n\n"]
    got = model.ask(CHAT, {"model": "policy", "stream": True, "messages": GO}, Wire(pieces))
    events = [json.loads(line[6:]) for line in got.body.decode().splitlines() if line.startswith("data: {")]
    assert [one["delta"] for event in events for one in event["choices"]] == [{"content": "hi"}], events
    (call,) = model.proxy.rollout(got.headers["x-rollout-id"])["calls"]
    assert (call["response_token_ids"], call["trainable"]) == ([7, 8], True)


# Numbers of any size and length come back from the record as they were sent

NUMBERS = (
    "[1,1.0,-0.0,0.1234567890123456789,123456789012345678901234567890,-9223372036854775809,1e400,1e-400,"
    f"3.14159265358979323846,9007199254740993.0,{'7' * 4999}]"
)
TOP = '"type":"message","role":"assistant","model":"m","stop_reason":"tool_use","usage":{"input_tokens":1,"x":NNN}'
WHOLE = {
    CHAT: '{"id":"c","x":NNN,"usage":{"prompt_tokens":1,"cost":NNN},"choices":[{"index":0,"message":{"role":'
          '"assistant","content":"x","n":NNN},"finish_reason":"stop"}]}',
    MESSAGES: '{"id":"m","content":[{"type":"tool_use","id":"t","name":"f","input":{"n":NNN}}],' + TOP + "}",
}  # fmt: skip
STREAMED = {
    CHAT: ['{"id":"c","x":NNN,"choices":[{"index":0,"delta":{"content":"x","n":NNN}}]}',
           '{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"cost":NNN}}', "[DONE]"],
    MESSAGES: ['{"type":"message_start","message":{"id":"m","content":[],' + TOP + "}}",
               '{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"f",'
               '"input":{}}}',
               json.dumps({"type": "content_block_delta", "index": 0,
                           "delta": {"type": "input_json_delta", "partial_json": '{"n":NNN}'}}),
               '{"type":"message_stop"}'],
}  # fmt: skip


def exactly(text: str | bytes) -> Any:
    """The value with every number as its digits."""
    return json.loads(text, parse_int=lambda digits: ("whole", digits), parse_float=lambda d: ("fraction", Decimal(d)))


THERE = exactly(NUMBERS)


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_come_back_as_they_were_sent(stream: bool, model: Scripted) -> None:
    for name, path in (("m", CHAT), ("policy", CHAT), ("m", MESSAGES)):
        check_numbers(name, path, stream, model)


def check_numbers(name: str, path: str, stream: bool, model: Scripted) -> None:
    rollout = uuid.uuid4().hex
    flag = json.dumps(stream)
    body = f'{{"model":"{name}","stream":{flag},"messages":[{{"role":"user","content":"x","n":NNN}}],"x":NNN}}'
    body = body.replace("NNN", NUMBERS)
    text = "".join(f"data: {event}\n\n" for event in STREAMED[path]) if stream else WHOLE[path]
    answer = Wire([text.replace("NNN", NUMBERS).encode()], "text/event-stream" if stream else "application/json")
    with model.script(answer) as headers:
        got = model.proxy.post(f"/rollouts/{rollout}{path}", body.encode(), **headers)
    assert got.status == 200 and (stream or exactly(got.body) == exactly(b"".join(answer.pieces)))
    found = exactly(model.proxy.call("GET", f"/rollouts/{rollout}?requests=whole").body)
    (call,) = found["calls"]
    assert call["request"] == exactly(body)
    if path == CHAT:
        assert call["usage"]["cost"] == call["response"]["usage"]["cost"] == call["response"]["x"] == THERE
        assert call["response"]["choices"][0]["message"]["n"] == THERE
    else:
        assert call["usage"]["x"] == THERE and call["response"]["content"][0]["input"] == {"n": THERE}
        assert exactly(call["tool_calls"][0]["arguments"]) == {"n": THERE}
    shown = model.proxy.call("GET", f"/rollouts/{rollout}/transitions").body
    assert shown.count(b'"n":' + NUMBERS.encode()) == 2, "in the state and in the action"
