"""CONTRACT.md, section 4: what cannot be trained on is recorded with the reason, and the agent's request succeeds."""

from __future__ import annotations

import json
import re
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

from contract.scripted import CHAT, MESSAGES, RESPONSES, Json, Scripted, Wire, said, sampled, scripted, user
from contract.system import Answer, Proxy, in_this_process
from contract.vllm import PlayedVllm

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
RENDER = f"{CHAT}/render"


def exactly(text: str | bytes) -> Any:
    """The value with every number as its digits."""
    return json.loads(text, parse_int=lambda digits: ("whole", digits), parse_float=lambda d: ("fraction", Decimal(d)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("served", "path"), [("m", CHAT), ("policy", CHAT), ("m", MESSAGES)])
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


def ask(model: Scripted, rollout: str, answer: Any = vllm, /, **fields: Any) -> Answer:
    body = {"model": "policy", "input": "go"} | fields
    with model.script(answer) as headers:
        return model.proxy.post(f"/rollouts/{rollout}{RESPONSES}", body, **headers)


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
    assert answer.status == 400 and "only the Responses route supports background" in answer.error["message"]
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


def rendered(body: Json) -> list[int]:
    def text(content: Any) -> str:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    said = "".join(f"<{m['role']}>{text(m['content'])}|" for m in body["messages"])
    said += "<assistant>" * body.get("add_generation_prompt", True)
    return [PAIR if token == 1 else token for token in said.replace("ll", "\x01").replace("|", "\x00").encode()]


class DriftingVllm(PlayedVllm):
    """Answers the number of the call and "hello", and takes prompts as tokens."""

    refuses_tokens = False
    more: Json | None = None  # of each message

    async def _render(self, request: web.Request) -> web.Response:
        return web.json_response({"token_ids": rendered(await request.json())})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self.refuses_tokens and "kv_transfer_params" in await request.json():
            return web.json_response({"error": {"message": "no tokens, please"}}, status=400)
        return await super()._chat(request)

    def _whole(self, body: Json) -> Any:
        text, given = f"{len(self.requests)} hello", body.get("kv_transfer_params") if self.takes_tokens else None
        prompt = given["prompt_token_ids"] if given else rendered(body)
        return json.loads(sampled(said(text, **self.more or {}), prompt, [*text.encode(), END]).pieces[0])

    def _chunks(self, body: Json) -> Iterator[Json]:
        chunk = self._whole(body)
        for choice in chunk["choices"]:
            choice["delta"] = choice.pop("message")
        yield chunk


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
    text, counter = proxy.call("GET", "/metrics").body.decode(), r'lightning_token_continuity_total{outcome="(\w+)"}'
    return {outcome: int(count) for outcome, count in re.findall(rf"^{counter} (\d+)", text, re.M)}


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
        ({"refuses": {RENDER: 403}}, "unavailable", "add --enable-scale-out"),
        ({"refuses": {RENDER: 500}}, "refused", ""), ({"refuses_tokens": True}, "refused", ""),
        ({"takes_tokens": False}, "ignored", "does not take prompts as"),
    ]  # fmt: skip
    for n, (fault, outcome, hint) in enumerate(faults):
        with drifting(tmp_path / f"{n}") as proxy:
            for name, value in fault.items():
                setattr(proxy.vllm, name, value)
            talk(proxy, 3, [])
            assert (rows(proxy), outcomes(proxy)) == (3, {"first": 1, outcome: 2})
            assert not hint or caplog.text.count(hint) == 1
