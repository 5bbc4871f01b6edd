"""CONTRACT.md, section 1: what an agent meets that changed its base URL and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.system import Proxy, in_this_process, played
from contract.vllm import ANSWER, LOGPROBS, PROMPT, PlayedVllm

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
INJECTED = ("token_ids", "prompt_token_ids", "logprobs")


def named(proxy: Proxy, path: str = "", key: str | None = None, **headers: str) -> str:
    """The rollout that a call with this path and these headers belongs to."""
    answer = proxy.post(f"{path}/v1/chat/completions", CHAT, key, **headers)
    assert answer.status == 200, answer.body
    return answer.headers["x-rollout-id"]


def test_headers_or_a_url_name_the_rollout_its_task_and_its_agent(proxy: Proxy, name: str) -> None:
    headers = {"X_Rollout_Id": f"{name}-1", "X_Task_Id": "t1", "X_Agent_Name": "a1", "X_Rollout_Mode": "eval"}
    assert [named(proxy, **headers), named(proxy, f"/rollouts/{name}-2/tasks/t2/agents/a2")] == [
        f"{name}-1",
        f"{name}-2",
    ]
    found = [proxy.rollout(f"{name}-{i}") for i in (1, 2)]
    assert [(one["task_id"], one["calls"][0]["agent"], one["mode"]) for one in found] == [
        ("t1", "a1", "eval"), ("t2", "a2", "train"),
    ]  # fmt: skip


def test_the_header_wins_over_the_url_and_the_url_over_the_key(proxy: Proxy, name: str) -> None:
    (opened,) = proxy.post("/rollouts", {"task_id": "t"}).json
    key = opened["api_key"]
    assert named(proxy, key=key) == opened["rollout_id"]
    assert named(proxy, f"/rollouts/{name}") == name
    assert named(proxy, f"/rollouts/{name}/tasks/t", X_Rollout_Id=f"{name}-h") == f"{name}-h"
    assert proxy.rollout(f"{name}-h")["task_id"] is None, "of a URL that does not count, nothing does"


def test_a_call_without_a_name_continues_the_conversation_that_it_extends_or_opens_a_rollout(proxy: Proxy) -> None:
    first = [{"role": "user", "content": "one of a kind"}]
    opened = proxy.chat(None, *first)
    answer = opened.json["choices"][0]["message"]
    extended = proxy.chat(None, *first, answer, {"role": "user", "content": "go on"})
    assert extended.headers["x-rollout-id"] == opened.headers["x-rollout-id"]
    other = proxy.chat(None, {"role": "user", "content": "another"})
    assert other.headers["x-rollout-id"] != opened.headers["x-rollout-id"]


def test_a_url_wins_piece_by_piece_and_headers_say_what_it_leaves_out(proxy: Proxy, name: str) -> None:
    headers = {"X_Task_Id": "t-header", "X_Agent_Name": "a-header", "X_Rollout_Mode": "eval"}
    named(proxy, f"/rollouts/{name}-1/tasks/t-url", **headers)
    named(proxy, f"/rollouts/{name}-2/agents/a-url", **headers)
    found = [proxy.rollout(f"{name}-{i}") for i in (1, 2)]
    assert [(one["task_id"], one["calls"][0]["agent"], one["mode"]) for one in found] == [
        ("t-url", "a-header", "eval"),
        ("t-header", "a-url", "eval"),
    ]


def test_an_id_of_other_characters_or_too_long_is_400(proxy: Proxy) -> None:
    for header in ("X-Rollout-Id", "X-Task-Id", "X-Agent-Name"):
        for wrong in ("", "a b", "é", "x" * 201, "a/b", "'; --"):
            headers = {header.encode(): wrong.encode()}
            answer = proxy.client.post(f"{proxy.url}/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["message"], (header, wrong)
    for path in ("/rollouts/{}", "/rollouts/r/tasks/{}", "/rollouts/r/agents/{}"):
        for wrong in ("a%20b", "%C3%A9", "x" * 201):
            assert proxy.post(f"{path.format(wrong)}/v1/chat/completions", CHAT).status == 400, (path, wrong)
    name = "aZ09._:-" + "x" * 192
    assert named(proxy, X_Rollout_Id=name) == name


def test_other_urls_name_no_rollout_and_other_modes_are_refused(proxy: Proxy, name: str) -> None:
    for path in ("/rollouts/a/b", "/rollouts/r/agents/a/tasks/t", "/rollouts", "/v2"):
        assert proxy.post(f"{path}/v1/chat/completions", CHAT).status == 404, path
    for mode in ("", "test", "EVAL"):
        answer = proxy.post(f"/rollouts/{name}/v1/chat/completions", CHAT, X_Rollout_Mode=mode)
        assert answer.status == 400 and "train or eval" in answer.error["message"]


def test_a_rollouts_key_names_it_wherever_clients_put_it(proxy: Proxy) -> None:
    for header in ("Authorization", "X_Api_Key", "Api_Key"):
        (opened,) = proxy.post("/rollouts", {}).json
        value = f"Bearer {opened['api_key']}" if header == "Authorization" else opened["api_key"]
        assert named(proxy, **{header: value}) == opened["rollout_id"]
        assert proxy.vllm is not None
        assert opened["api_key"] not in json.dumps(proxy.vllm.requests[-1]), "it is not passed on"


def test_every_recorded_answer_names_rollout_call_and_version(proxy: Proxy, name: str) -> None:
    answer = proxy.chat(name)
    (call,) = proxy.rollout(name)["calls"]
    told = [answer.headers[header] for header in ("x-rollout-id", "x-call-id", "x-policy-version")]
    assert told == [name, call["call_id"], "0"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_proxy_asked_for_on_top_is_taken_out_again(proxy: Proxy, name: str, stream: bool) -> None:
    body = proxy.chat(name, stream=stream).body
    assert not [word for word in INJECTED if f'"{word}": [' in body.decode() or f'"{word}":[' in body.decode()], body
    assert proxy.vllm is not None
    asked = proxy.vllm.requests[-1]
    assert (asked["return_token_ids"], asked["logprobs"]) == (True, True)
    (call,) = proxy.rollout(name)["calls"]
    assert (call["prompt_token_ids"], call["response_token_ids"], call["logprobs"]) == (PROMPT, ANSWER, LOGPROBS)
    assert call["trainable"] and call["usage"]["completion_tokens"] == len(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_agent_asked_for_itself_stays(proxy: Proxy, name: str, stream: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    body = proxy.chat(name, stream=stream, logprobs=True, return_token_ids=True, **options).body.decode()
    assert [word for word in (*INJECTED, "usage") if f'"{word}"' not in body] == []


def test_frames_of_a_stream_arrive_when_they_are_sent(proxy: Proxy, name: str) -> None:
    assert proxy.vllm is not None
    proxy.vllm.delay_s = 0.2
    events: list[str] = []
    try:
        with proxy.client.stream(
            "POST", f"{proxy.url}/rollouts/{name}/v1/chat/completions", json=CHAT | {"stream": True}
        ) as got:
            for line in got.iter_lines():
                if line.startswith("data: ") and not events:
                    assert proxy.rollout(name)["calls"][0]["status"] == "incomplete", "it is still under way"
                events += [line] if line else []
    finally:
        proxy.vllm.delay_s = 0.0
    assert events[-1] == "data: [DONE]" and len(events) == 4


def test_recording_off_keeps_a_call_out_of_the_record_and_only_keeps_it_from_training(proxy: Proxy, name: str) -> None:
    answer = proxy.post(f"/rollouts/{name}/v1/chat/completions", CHAT, X_Recording="off")
    assert answer.status == 200 and proxy.call("GET", f"/rollouts/{name}").status == 404
    proxy.post(f"/rollouts/{name}/v1/chat/completions", CHAT, X_Recording="only")
    (call,) = proxy.rollout(name)["calls"]
    assert (call["status"], call["trainable"]) == ("ok", False) and call["untrainable_reason"]
    (opened,) = proxy.post("/rollouts", {}).json
    refused = proxy.post("/v1/chat/completions", CHAT, opened["api_key"], X_Recording="off")
    assert refused.status == 403, "a rollout's own key leaves nothing out"


def test_the_policys_alias_can_have_another_name(tmp_path: Path) -> None:
    with in_this_process(tmp_path, policy={"alias": "mine"}) as proxy:
        assert {model["id"] for model in proxy.get("/v1/models")["data"]} == {"base", "mine"}
        answer = proxy.post("/v1/chat/completions", CHAT | {"model": "mine"})
        assert (answer.status, answer.headers["x-policy-version"]) == (200, "0")
        assert proxy.vllm is not None and proxy.vllm.requests[-1]["model"] == "base"


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_any_model_server_will_do_for_recording(tmp_path: Path, kind: str) -> None:
    vllm = PlayedVllm(tmp_path)
    operators = ("weight_info", "is_paused", "pause", "resume", "collective_rpc", "tokenize", "v1/load_lora_adapter")
    vllm.refuses = dict.fromkeys([f"/{path}" for path in (*operators, "v1/chat/completions/render")], 404)
    vllm.returns_token_ids = kind == "vllm"
    with played(vllm) as url:
        upstream = {"name": "any", "kind": kind, "base_url": f"{url}/v1", "model_map": {"policy": "base"}}
        if kind == "vllm":
            del upstream["model_map"]
        with in_this_process(tmp_path, upstreams=[upstream]) as proxy:
            assert proxy.chat("r1").status == 200
            (call,) = proxy.rollout("r1")["calls"]
            assert (call["status"], call["trainable"]) == ("ok", kind == "vllm")
            assert proxy.get("/readyz")["status"] == "ready"


def test_an_upstream_without_a_key_of_its_own_gets_the_agents(tmp_path: Path) -> None:
    vllm = PlayedVllm(tmp_path)
    with played(vllm) as url:
        one = {"kind": "openai", "base_url": f"{url}/v1", "model_map": {"policy": "base"}}
        upstreams = [one | {"name": "policy"}, one | {"name": "own", "api_key": "upstreams", "models": ["base"]}]
        with in_this_process(tmp_path, upstreams=upstreams) as proxy:
            for model, sent, passed in (
                ("policy", "agents-own", "Bearer agents-own"),
                ("base", "agents-own", "Bearer upstreams"),
                ("base", None, "Bearer upstreams"),
            ):
                answer = proxy.post("/rollouts/r1/v1/chat/completions", CHAT | {"model": model}, sent)
                headers = {name.lower(): value for name, value in vllm.requests[-1]["headers"].items()}
                assert (answer.status, headers["authorization"]) == (200, passed)
                shown = json.dumps(proxy.rollout("r1")) + json.dumps(proxy.get("/status")) + answer.body.decode()
                assert "upstreams" not in shown and "agents-own" not in shown
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("*.db*"))
    assert b"agents-own" not in kept and b"Bearer" not in kept


def test_our_headers_and_keys_are_not_passed_on(tmp_path: Path) -> None:
    with in_this_process(tmp_path, proxy={"api_keys": ["ours"]}) as proxy:
        assert proxy.chat("r1", key="ours").status == 200
        assert proxy.vllm is not None
        headers = {name.lower(): value for name, value in proxy.vllm.requests[-1]["headers"].items()}
        assert "ours" not in json.dumps(headers) and not [h for h in headers if h.startswith("x-rollout")]
