"""CONTRACT.md, section 4: what cannot be trained on is recorded with the reason, and the agent's request succeeds."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from contract.scripted import (
    ASKED,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Json,
    Scripted,
    Wire,
    said,
    sampled,
    scripted,
    user,
)
from contract.system import Answer, Proxy, in_this_process
from contract.vllm import PlayedVllm

GO = [user("go")]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
NUMBERS = (
    "[1,1.0,-0.0,0.1234567890123456789,123456789012345678901234567890,-9223372036854775809,1e400,1e-400,"
    f"3.14159265358979323846,9007199254740993.0,{'7' * 4999}]"
)
WHOLE = {
    CHAT: '{"id":"c","x":NNN,"usage":{"prompt_tokens":1,"cost":NNN},"choices":[{"index":0,"message":{"role":'
          '"assistant","content":"x","n":NNN},"finish_reason":"stop"}]}',
    MESSAGES: '{"id":"m","type":"message","role":"assistant","model":"m","stop_reason":"tool_use","usage":{"cost":NNN},'
              '"x":NNN,"content":[{"type":"tool_use","id":"t","name":"f","input":{"n":NNN}}]}',
}  # fmt: skip
STREAMED = {
    CHAT: ['{"id":"c","x":NNN,"choices":[{"index":0,"delta":{"content":"x","n":NNN}}]}',
           '{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"cost":NNN}}', "[DONE]"],
    MESSAGES: ['{"type":"message_start","message":{"id":"m","content":[],"x":NNN,"usage":{"cost":NNN}}}',
               '{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"f"}}',
               '{"type":"content_block_delta","index":0,"delta":{"partial_json":"{\\"n\\":NNN}"}}',
               '{"type":"message_stop"}'],
}  # fmt: skip
UPSTREAMS: list[Json] = [
    {"name": "policy", "fallbacks": ["other"]},
    {"name": "other", "kind": "openai", "models": ["theirs", "m"], "model_map": {"policy": "theirs"}},
]
REDACT = {"redact": {"patterns": ["secret-[0-9]+"]}}
END, PAIR = 0, 256


def logprobs(*values: Any) -> Json:
    return {"logprobs": {"content": [{"token": "x", "logprob": value} for value in values]}}


def answer(choice: Json | None = None, **fields: Any) -> Json:
    """A chat's answer as vLLM gives it, with these changes."""
    made = {"index": 0, "message": said("hi!"), "finish_reason": "stop", "token_ids": [7, 8], **logprobs(-0.5, -0.25)}
    top = {"id": "c1", "object": "chat.completion", "created": 1, "model": "base", "usage": USAGE}
    return top | {"choices": [made | (choice or {})], "prompt_token_ids": [1, 2, 3]} | fields


def wire(body: Any, stream: bool = False) -> Wire:
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
    choice = {"index": 0, "text": "x", "finish_reason": "stop", "token_ids": [7, 8], "prompt_token_ids": [1, 2, 3]}
    completion = {"id": "c1", "usage": USAGE, "choices": [choice | {"logprobs": {"token_logprobs": [-0.5, -0.25]}}]}
    for path in ASKED:
        call = call_of(model, completion if path == COMPLETIONS else answer(), path, stream, temperature=0.7)
        assert (call["prompt_token_ids"], call["response_token_ids"]) == ([1, 2, 3], [7, 8]), path
        assert (call["logprobs"], call["trainable"], call["policy_version"]) == ([-0.5, -0.25], True, 0)
        assert call["policy_versions"] == [0] and call["request"]["temperature"] == 0.7


def test_an_answer_of_any_shape_reaches_the_agent_and_the_record(model: Scripted) -> None:
    assert "may be cut" in call_of(model, answer({"finish_reason": None}))["untrainable_reason"]
    assert call_of(model, answer({"finish_reason": "length"}))["trainable"], "to the agent's own limit"
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


def exactly(text: str | bytes) -> Any:
    """The value with every number as its digits."""
    return json.loads(text, parse_int=lambda digits: ("whole", digits), parse_float=lambda d: ("fraction", Decimal(d)))


@pytest.mark.parametrize(
    ("served", "path", "stream"),
    [
        (name, path, stream)
        for name, path in (("m", CHAT), ("policy", CHAT), ("m", MESSAGES))
        for stream in (False, True)
    ],
)
def test_numbers_come_back_as_they_were_sent(
    served: str, path: str, stream: bool, model: Scripted, rollout: str
) -> None:
    there = exactly(NUMBERS)
    body = f'{{"model":"{served}","stream":{json.dumps(stream)},"messages":[{{"role":"user","content":"x","n":NNN}}]'
    body = f'{body},"x":NNN}}'.replace("NNN", NUMBERS)
    text = "".join(f"data: {event}\n\n" for event in STREAMED[path]) if stream else WHOLE[path]
    played = Wire([text.replace("NNN", NUMBERS).encode()], "text/event-stream" if stream else "application/json")
    with model.script(played) as headers:
        got = model.proxy.post(f"/rollouts/{rollout}{path}", body.encode(), **headers)
    assert got.status == 200 and (stream or exactly(got.body) == exactly(b"".join(played.pieces)))
    (call,) = exactly(model.proxy.call("GET", f"/rollouts/{rollout}?requests=whole").body)["calls"]
    assert call["request"] == exactly(body)
    assert call["usage"]["cost"] == call["response"]["usage"]["cost"] == call["response"]["x"] == there
    if path == CHAT:
        assert call["response"]["choices"][0]["message"]["n"] == there
    else:
        assert call["response"]["content"][0]["input"] == exactly(call["tool_calls"][0]["arguments"]) == {"n": there}
    shown = model.proxy.call("GET", f"/rollouts/{rollout}/transitions").body
    assert shown.count(b'"n":' + NUMBERS.encode()) == 2, "in the state and in the action"


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


def test_a_response_that_cannot_be_gone_on_with_is_told_why(model: Scripted, rollout: str) -> None:
    first = respond(model, rollout, 1)
    refusal = {"error": {"message": "max_completion_tokens is too large", "type": "BadRequestError", "code": 400}}
    refused = Wire([json.dumps(refusal).encode()], "application/json", 400)
    answer = ask(model, rollout, refused, previous_response_id=first)
    assert (answer.status, answer.error["message"]) == (400, "max_output_tokens is too large")
    assert model.asked["path"] == CHAT and "return_token_ids" not in model.asked, "asked again without our additions"
    assert [call["status"] for call in model.proxy.rollout(rollout)["calls"]] == ["ok", "error"]
    answer = ask(model, rollout, previous_response_id=first, background=True)
    assert answer.status == 400 and "background is only known to the Responses route" in answer.error["message"]
    assert answer.error["param"] == "previous_response_id" and model.asked == {}
    model.proxy.post(f"/rollouts/{rollout}/end", {"status": "completed"})
    assert model.proxy.call("DELETE", f"/rollouts/{rollout}").status == 204
    answer = ask(model, rollout, previous_response_id=first)
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")


def test_a_fallback_is_asked_with_the_whole_conversation(model: Scripted, rollout: str) -> None:
    first = respond(model, rollout, 1)
    answer = ask(model, rollout, lambda b: vllm(b) if b["model"] == "theirs" else 503, previous_response_id=first)
    assert (answer.status, len(model.asked["messages"]), "return_token_ids" in model.asked) == (200, 3, False)
    respond(model, rollout, 5, previous_response_id=answer.json["id"])
    assert [call["trainable"] for call in model.proxy.rollout(rollout)["calls"]] == [True, False, True]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_stream_that_breaks_is_seen_as_broken(path: str, model: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    begun: Json = {"id": "x", "choices": [{"index": 0, "delta": {"content": "h"}, "finish_reason": None}]}
    whole = "data: [DONE]\n\n"
    for stream in (f"data: {json.dumps(begun)}\n\n", whole, 'data: {"choices": [5]}\n\n', f"data: {{}}\n\n{whole}"):
        body: Json = {"model": "policy", "stream": True} | ASKED[path]
        rollout, answer = uuid.uuid4().hex, Wire([stream.encode()], breaks="delta" in stream)
        _, _, is_whole = model.receive("POST", f"/rollouts/{rollout}{path}", body, answer)
        (call,) = model.proxy.rollout(rollout)["calls"]
        assert not is_whole and (call["status"], call["trainable"]) == ("error", False), stream
    assert "internal error" not in caplog.text


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_tool_calls_arguments_are_passed_on_as_they_come(path: str, model: Scripted, rollout: str) -> None:
    begun: Json = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"begun"'}}
    pieces = [{"index": 0} | begun, {"index": 0, "function": {"arguments": ": 1}"}}]
    choices = [*({"delta": {"tool_calls": [one]}, "finish_reason": None} for one in pieces),
               {"delta": {}, "finish_reason": "tool_calls"}]  # fmt: skip
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    chunks = [{"choices": [{"index": 0} | choice]} for choice in choices] + [{"choices": [], "usage": usage}]
    top = {"id": "c1", "created": 1, "model": "base"}
    head, *rest = [b"data: " + json.dumps(top | chunk).encode() + b"\n\n" for chunk in chunks]
    body: Json = {"model": "policy", "stream": True} | ASKED[path]
    answer = Wire([head, b"".join([*rest, b"data: [DONE]\n\n"])], gate=threading.Event())
    _, _, is_whole = model.receive("POST", f"/rollouts/{rollout}{path}", body, answer, b'{\\"begun\\"')
    assert is_whole and not answer.was_held
    (call,) = model.proxy.rollout(rollout)["calls"]
    assert [json.loads(tool["arguments"]) for tool in call["tool_calls"]] == [{"begun": 1}]


def rendered(body: Json) -> list[int]:
    def text(content: Any) -> str:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    said = "".join(f"<{m['role']}>{text(m['content'])}|" for m in body["messages"])
    said += "<assistant>" * body.get("add_generation_prompt", True)
    return [PAIR if token == 1 else token for token in said.replace("ll", "\x01").replace("|", "\x00").encode()]


class DriftingVllm(PlayedVllm):
    """Answers the number of the call and "hello", and takes prompts as tokens."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.render_status, self.refuses_tokens, self.ignores_tokens = 200, False, False
        self.more: Json = {}  # of each message

    async def _render(self, request: web.Request) -> web.Response:
        body: Json = {"token_ids": rendered(await request.json())} if self.render_status == 200 else {"error": {}}
        return web.json_response(body, status=self.render_status)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given and self.refuses_tokens:
            return web.json_response({"error": {"message": "no tokens, please"}}, status=400)
        prompt = rendered(body) if given is None or self.ignores_tokens else given
        ids = [*f"{len(self.requests)} hello".encode(), END]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        logprobs = {"content": [{"token": "", "logprob": -0.5} for _ in ids]}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
        top = {"id": "x", "model": "base", "prompt_token_ids": prompt, "usage": usage}
        message = said(f"{len(self.requests)} hello", **self.more)
        if not body.get("stream"):
            return web.json_response(top | {"choices": [choice | {"message": message}]})
        text = f"data: {json.dumps(top | {'choices': [choice | {'delta': message}]})}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")


@contextmanager
def drifting(directory: Path, **more: Any) -> Iterator[Proxy]:
    directory.mkdir(exist_ok=True)
    with in_this_process(directory, DriftingVllm(directory), policy={"token_continuity": "exact"}, **more) as proxy:
        yield proxy


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with drifting(tmp_path) as one:
        yield one


def talk(proxy: Proxy, turns: int, messages: list[Json], rollout: str = "r", **fields: Any) -> list[Json]:
    for number in range(turns):
        messages = [*messages, user(f"all {number}")]
        answer = proxy.chat(rollout, *messages, **fields)
        assert answer.status == 200 and b'_token_ids": [' not in answer.body
        choice = json.loads(answer.body.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]
        messages = [*messages, choice.get("message") or choice["delta"]]
    return messages


def rows(proxy: Proxy, rollout: str = "r") -> int:
    """How many training rows the rollout makes: calls that no other one's prompt begins with."""
    calls = proxy.rollout(rollout)["calls"]
    assert all(call["trainable"] for call in calls)
    whole = [call["prompt_token_ids"] + call["response_token_ids"] for call in calls]
    return sum(not any(call["prompt_token_ids"][: len(row)] == row for call in calls) for row in whole)


def outcomes(proxy: Proxy) -> dict[str, int]:
    lines = proxy.call("GET", "/metrics").body.decode().splitlines()
    found = (line.split(" ") for line in lines if line.startswith("lightning_token_continuity_total{"))
    return {labels.split('"')[1]: int(float(value)) for labels, value in found}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_row_and_its_text_is_the_same(proxy: Proxy, stream: bool) -> None:
    messages = talk(proxy, 4, [], stream=stream)
    assert [m["content"] for m in messages[1::2]] == [f"{n} hello" for n in (1, 2, 3, 4)]
    assert (rows(proxy), outcomes(proxy)) == (1, {"first": 1, "exact": 3})


def test_branches_go_on_each_with_its_own_also_over_several_proxies(tmp_path: Path) -> None:
    with drifting(tmp_path / "one") as one:
        config = yaml.safe_load(one.config.read_text())
        with drifting(tmp_path / "other", store=config["store"], upstreams=config["upstreams"]) as other:
            messages: list[Json] = []
            for proxy in (one, other, one, other, other, one):
                messages = talk(proxy, 1, messages)
            assert rows(one) == 1
            assert (outcomes(one), outcomes(other)) == ({"first": 1, "exact": 2}, {"exact": 3})
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda _: talk(one, 2, messages), range(3)))
            talk(one, 2, [], "another")
            assert (rows(one), rows(one, "another"), outcomes(one)) == (3, 1, {"first": 2, "exact": 2 + 6 + 1})


def test_an_answer_is_known_however_the_client_sends_it_back(proxy: Proxy) -> None:
    parts = [{"type": "text", "text": "1 "}, {"type": "text", "text": "hello"}]
    call: Json = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rewritten = call | {"id": "mine", "function": {"name": "add", "arguments": '{"a":1}'}}
    ways: list[tuple[Json, Json, str]] = [
        ({}, said("1 hello", refusal=None, tool_calls=[], audio=None), "exact"),
        ({}, said(parts), "exact"),
        ({"reasoning": "hm"}, said("1 hello", reasoning_content="hm"), "exact"),
        ({"reasoning": "hm"}, said("1 hello"), "exact"),
        ({"tool_calls": [call]}, said("1 hello", tool_calls=[rewritten]), "exact"),
        ({"reasoning": "hm"}, said("1 hello", reasoning="other"), "edited"),
        ({}, said("1 hello", tool_calls=[call]), "edited"),
        ({}, said("1 hello!"), "edited"),
    ]
    found = Counter[str]()
    for n, (more, kept, outcome) in enumerate(ways):
        proxy.vllm.more, proxy.vllm.requests, name = more, [], f"r{n}"
        (first, _) = talk(proxy, 1, [], name)
        proxy.chat(name, first | {"name": None}, kept, user("more"))
        found.update(["first", outcome])
        assert outcomes(proxy) == found, kept
        assert rows(proxy, name) == (1 if outcome == "exact" else 2)


def test_what_cannot_be_exact_goes_as_text_and_is_counted(proxy: Proxy) -> None:
    before = talk(proxy, 1, [])
    proxy.chat("r", *before[:-1], said("No."), user("more"))
    proxy.chat("r", *before, user("more"), tools=[{"type": "function", "function": {"name": "f"}}])
    for more in ({"truncate_prompt_tokens": 500}, {"add_generation_prompt": False}, {"n": 2}):
        proxy.chat("r", *before, user("more"), **more)
    assert not any("kv_transfer_params" in body for body in proxy.vllm.requests)
    assert outcomes(proxy) == {"first": 1, "edited": 1, "changed": 1, "unsupported": 3}


def test_a_server_that_takes_no_tokens_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faults: list[tuple[Json, str, str]] = [
        ({"render_status": 403}, "unavailable", "add --enable-scale-out"), ({"render_status": 500}, "refused", ""),
        ({"ignores_tokens": True}, "ignored", "does not take prompts as"), ({"refuses_tokens": True}, "refused", ""),
    ]  # fmt: skip
    for n, (fault, outcome, hint) in enumerate(faults):
        with drifting(tmp_path / f"{n}") as proxy:
            for name, value in fault.items():
                setattr(proxy.vllm, name, value)
            talk(proxy, 3, [])
            assert (rows(proxy), outcomes(proxy)) == (3, {"first": 1, outcome: 2})
            assert not hint or caplog.text.count(hint) == 1
