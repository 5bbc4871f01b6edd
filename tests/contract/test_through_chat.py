"""CONTRACT.md, section 4, Dialects: Responses and Messages are answered through vLLM's chat route.

vLLM keeps no responses itself, so what a request goes on with is known from the record.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import CHAT, MESSAGES, RESPONSES, Json, Scripted, Wire, said, sampled, scripted, user
from contract.system import Answer

ASKED: dict[str, Json] = {RESPONSES: {"input": "hi"}, MESSAGES: {"messages": [user("hi")], "max_tokens": 9}}
UPSTREAMS: list[Json] = [
    {"name": "policy", "fallbacks": ["other"]},
    {"name": "other", "kind": "openai", "models": ["theirs"], "model_map": {"policy": "theirs"}},
]
REDACT = {"redact": {"patterns": ["secret-[0-9]+"]}}


def wire(status: int, body: Any) -> Wire:
    return Wire([json.dumps(body).encode()], "application/json", status)


def vllm(body: Json) -> Any:
    """The chat route's answer, which says how many messages it was asked with; the other routes know no response."""
    if body["path"] != CHAT:
        return 404
    return sampled(said(f"{len(body['messages'])} messages"), [1, 2], [7])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("chat"), upstreams=UPSTREAMS) as one:
        yield one


def ask(model: Scripted, rollout: str, answer: Any = vllm, path: str = RESPONSES, /, **fields: Any) -> Answer:
    body = {"model": "policy"} | ASKED[path] | fields
    with model.script(answer) as headers:
        return model.proxy.post(f"/rollouts/{rollout}{path}", body, **headers)


def respond(model: Scripted, rollout: str, messages: int, /, **fields: Any) -> str:
    """The id of a response, for which the model was asked with this number of messages."""
    answer = ask(model, rollout, **fields)
    assert answer.status == 200 and model.asked["path"] == CHAT, answer.body
    assert answer.json["output"][0]["content"][0]["text"] == f"{messages} messages"
    return str(answer.json["id"])


def test_a_response_goes_on_with_the_whole_conversation_also_after_a_restart(tmp_path: Path) -> None:
    with scripted(tmp_path) as model:
        first = respond(model, "r", 1)
        second = respond(model, "r", 3, previous_response_id=first)
    with scripted(tmp_path) as model:
        third = respond(model, "r", 5, previous_response_id=second)
        respond(model, "r", 3, previous_response_id=first)
        respond(model, "r", 7, previous_response_id=third)
        assert all(call["trainable"] for call in model.proxy.rollout("r")["calls"])


def test_what_is_redacted_in_the_record_is_not_so_for_the_model(tmp_path: Path) -> None:
    with scripted(tmp_path, recording=REDACT) as model:
        open_ = respond(model, "r", 1)
        hidden = respond(model, "r", 3, previous_response_id=open_, input="It is secret-1.")
        respond(model, "r", 5, previous_response_id=hidden)
        assert {"role": "user", "content": "It is secret-1."} in model.asked["messages"]
        assert "secret-1" not in json.dumps(model.proxy.rollout("r"))
    with scripted(tmp_path, recording=REDACT) as model:  # which knows it from the record only
        assert ask(model, "r", previous_response_id=hidden).status == 404
        assert model.asked["path"] == RESPONSES
        respond(model, "r", 3, previous_response_id=open_)


def test_a_deleted_rollout_is_not_gone_on_with(model: Scripted, rollout: str) -> None:
    first = respond(model, rollout, 1)
    model.proxy.post(f"/rollouts/{rollout}/end", {"status": "completed"})
    assert model.proxy.call("DELETE", f"/rollouts/{rollout}").status == 204
    answer = ask(model, rollout, previous_response_id=first)
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")


def test_a_refused_request_that_goes_on_is_told_why(model: Scripted, rollout: str) -> None:
    first = respond(model, rollout, 1)
    refusal = {"error": {"message": "max_completion_tokens is too large", "type": "BadRequestError", "code": 400}}
    answer = ask(model, rollout, wire(400, refusal), previous_response_id=first)
    assert (answer.status, answer.error["message"]) == (400, "max_output_tokens is too large")
    assert model.asked["path"] == CHAT and "return_token_ids" not in model.asked, "asked again without our additions"
    assert [call["status"] for call in model.proxy.rollout(rollout)["calls"]] == ["ok", "error"]


def test_a_fallback_is_asked_with_the_whole_conversation(model: Scripted, rollout: str) -> None:
    first = respond(model, rollout, 1)
    answer = ask(
        model, rollout, lambda body: vllm(body) if body["model"] == "theirs" else 503, previous_response_id=first
    )
    assert (answer.status, len(model.asked["messages"]), "return_token_ids" in model.asked) == (200, 3, False)
    respond(model, rollout, 5, previous_response_id=answer.json["id"])
    assert [call["trainable"] for call in model.proxy.rollout(rollout)["calls"]] == [True, False, True]


def test_what_only_the_responses_route_could_do_is_refused_where_that_does_not_know_the_response(
    model: Scripted, rollout: str
) -> None:
    first = respond(model, rollout, 1)
    answer = ask(model, rollout, previous_response_id=first, background=True)
    assert answer.status == 400 and "background is only known to the Responses route" in answer.error["message"]
    assert answer.error["param"] == "previous_response_id" and model.asked == {}


BEGUN: Json = {"id": "x", "choices": [{"index": 0, "delta": {"content": "h"}, "finish_reason": None}]}


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_breaks_or_is_no_chat_is_seen_as_broken(
    path: str, model: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    whole = "data: [DONE]\n\n"
    for stream in (f"data: {json.dumps(BEGUN)}\n\n", whole, 'data: {"choices": [5]}\n\n', f"data: {{}}\n\n{whole}"):
        body: Json = {"model": "policy", "stream": True} | ASKED[path]
        rollout, answer = uuid.uuid4().hex, Wire([stream.encode()], breaks="delta" in stream)
        _, _, is_whole = model.receive("POST", f"/rollouts/{rollout}{path}", body, answer)
        (call,) = model.proxy.rollout(rollout)["calls"]
        assert not is_whole and (call["status"], call["trainable"]) == ("error", False), stream
    assert "internal error" not in caplog.text


def called(*pieces: Json) -> list[bytes]:
    """A chat stream of a tool call in pieces."""
    end: Json = {"delta": {}, "finish_reason": "tool_calls"}
    choices = [*({"delta": {"tool_calls": [{"index": 0} | one]}, "finish_reason": None} for one in pieces), end]
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    chunks = [{"choices": [{"index": 0} | choice]} for choice in choices] + [{"choices": [], "usage": usage}]
    return [
        b"data: " + json.dumps({"id": "c1", "created": 1, "model": "base"} | chunk).encode() + b"\n\n"
        for chunk in chunks
    ]


@pytest.mark.parametrize("path", ASKED)
def test_a_tool_calls_arguments_are_passed_on_as_they_come(path: str, model: Scripted, rollout: str) -> None:
    first = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"begun"'}}
    head, *rest = called(first, {"function": {"arguments": ": 1}"}})
    body: Json = {"model": "policy", "stream": True} | ASKED[path]
    answer = Wire([head, b"".join([*rest, b"data: [DONE]\n\n"])], gate=threading.Event())
    _, _, is_whole = model.receive("POST", f"/rollouts/{rollout}{path}", body, answer, b'{\\"begun\\"')
    assert is_whole and not answer.was_held
    (call,) = model.proxy.rollout(rollout)["calls"]
    assert [json.loads(tool["arguments"]) for tool in call["tool_calls"]] == [{"begun": 1}]
