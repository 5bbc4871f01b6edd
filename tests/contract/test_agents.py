"""CONTRACT.md, section 1: what an agent meets that changed its base URL and nothing else."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import CHAT as CHATS
from contract.scripted import RESPONSES, Json, Scripted, Wire, said, together, user
from contract.system import Proxy, in_this_process
from contract.vllm import ANSWER, PlayedVllm

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
INJECTED = ("token_ids", "prompt_token_ids", "logprobs")
WRONG = ("", "a b", "é", "x" * 201, "a/b", "'; --")  # no ids
Q, DONE = user("What time is it, 0a1b2c3d?"), said("done")
FIRST = (CHATS, {"messages": [Q]}, said("hello"))
FOLLOW = (CHATS, {"messages": [Q, said("hello"), user("go on")]}, DONE)


def named(proxy: Proxy, path: str = "", key: str | None = None, **headers: str) -> str:
    answer = proxy.post(f"{path}/v1/chat/completions", CHAT, key, **headers)
    assert answer.status == 200, answer.body
    return answer.headers["x-rollout-id"]


def test_headers_or_a_url_name_the_rollout_its_task_and_its_agent(proxy: Proxy, name: str) -> None:
    """For the rollout the header wins, for the rest the URL, piece by piece."""
    more = {"X_Task_Id": "t-h", "X_Agent_Name": "a-h", "X_Rollout_Mode": "eval"}
    ways: list[tuple[str, dict[str, str], tuple[str | None, str | None, str]]] = [
        ("", {"X_Rollout_Id": f"{name}-0"} | more, ("t-h", "a-h", "eval")),
        (f"/rollouts/{name}-1/tasks/t/agents/a", {}, ("t", "a", "train")),
        (f"/rollouts/{name}-2/tasks/t", more, ("t", "a-h", "eval")),
        (f"/rollouts/{name}-3/agents/a", more, ("t-h", "a", "eval")),
        ("/rollouts/other/tasks/t", {"X_Rollout_Id": f"{name}-4", "X_Agent_Name": "a"}, (None, "a", "train")),
    ]
    for i, (path, headers, expected) in enumerate(ways):
        assert named(proxy, path, **headers) == f"{name}-{i}"
        found = proxy.rollout(f"{name}-{i}")
        assert (found["task_id"], found["calls"][0]["agent"], found["mode"]) == expected


def test_an_id_of_other_characters_or_too_long_is_400(proxy: Proxy) -> None:
    def refuses(path: str, method: str = "POST", /, **headers: Any) -> None:
        answer = proxy.call(method, path, CHAT if method == "POST" else None, **headers)
        assert answer.status == 400 and answer.error["message"], (method, path, headers)

    for header, wrong in itertools.product(("X-Rollout-Id", "X-Task-Id", "X-Agent-Name"), WRONG):
        refuses("/v1/chat/completions", **{header: wrong.encode()})
    for wrong in ("a%20b", "%C3%A9", "x" * 201):
        for path in (f"/rollouts/{wrong}", f"/rollouts/r/tasks/{wrong}", f"/rollouts/r/agents/{wrong}"):
            refuses(f"{path}/v1/chat/completions")
        refuses(f"/rollouts/{wrong}/end")
        for method in ("GET", "DELETE"):
            refuses(f"/rollouts/{wrong}", method)
    for mode in ("", "test", "EVAL"):
        refuses("/rollouts/r/v1/chat/completions", X_Rollout_Mode=mode)
    longest = "aZ09._:-" + "x" * 192
    assert named(proxy, X_Rollout_Id=longest) == longest
    for path in ("/rollouts/a/b", "/rollouts/r/agents/a/tasks/t", "/rollouts", "/v2"):
        assert proxy.post(f"{path}/v1/chat/completions", CHAT).status == 404, path


def test_a_rollouts_key_names_it_wherever_it_is_and_is_not_passed_on(proxy: Proxy, tmp_path: Path) -> None:
    for header in ("Authorization", "X_Api_Key", "Api_Key"):
        (opened,) = proxy.post("/rollouts", {}).json
        value = f"Bearer {opened['api_key']}" if header == "Authorization" else opened["api_key"]
        assert named(proxy, **{header: value}) == opened["rollout_id"]
        assert opened["api_key"] not in json.dumps(proxy.vllm.requests[-1]), "it is not passed on"
    with in_this_process(tmp_path, proxy={"api_keys": ["ours"]}) as keyed:
        assert keyed.chat("r1", key="ours").status == 200
        assert "ours" not in json.dumps(keyed.vllm.requests[-1]["headers"])


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_proxy_asked_for_on_top_is_taken_out_again(proxy: Proxy, name: str, stream: bool) -> None:
    body = proxy.chat(name, stream=stream).body.decode()
    assert not [word for word in INJECTED if f'"{word}": [' in body or f'"{word}":[' in body], body
    (call,) = proxy.rollout(name)["calls"]
    assert (call["response_token_ids"], call["usage"]["completion_tokens"]) == (ANSWER, len(ANSWER))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    body = proxy.chat(name, stream=stream, logprobs=True, return_token_ids=True, **options).body.decode()
    assert [word for word in (*INJECTED, "usage") if f'"{word}"' not in body] == []


def test_an_answer_names_rollout_call_and_version_unless_its_recording_is_off(proxy: Proxy, name: str) -> None:
    answer = proxy.post(f"/rollouts/{name}/v1/chat/completions", CHAT, X_Recording="off")
    assert answer.status == 200 and proxy.call("GET", f"/rollouts/{name}").status == 404
    proxy.post(f"/rollouts/{name}/v1/chat/completions", CHAT, X_Recording="only")
    (call,) = proxy.rollout(name)["calls"]
    assert (call["status"], call["trainable"]) == ("ok", False) and call["untrainable_reason"]
    answer = proxy.chat(f"{name}-on")
    (call,) = proxy.rollout(f"{name}-on")["calls"]
    told = [answer.headers[header] for header in ("x-rollout-id", "x-call-id", "x-policy-version")]
    assert told == [f"{name}-on", call["call_id"], "0"]
    (opened,) = proxy.post("/rollouts", {}).json
    refused = proxy.post("/v1/chat/completions", CHAT, opened["api_key"], X_Recording="off")
    assert refused.status == 403, "a rollout's own key leaves nothing out"


def test_the_alias_is_listed_looked_up_and_named_in_any_route_and_can_have_another_name(tmp_path: Path) -> None:
    with in_this_process(tmp_path, policy={"alias": "mine"}) as proxy:
        assert [model["id"] for model in proxy.get("/v1/models")["data"]] == ["base", "mine"]
        assert proxy.get("/v1/models/mine")["id"] == "mine"
        rendered = proxy.post("/v1/chat/completions/render", {"model": "mine", "messages": [], "max_tokens": 3}).json
        assert rendered["sampling_params"] == {"max_tokens": 3}
        answer = proxy.post("/v1/chat/completions", CHAT | {"model": "mine"})
        assert (answer.status, answer.headers["x-policy-version"]) == (200, "0")
        assert proxy.vllm.requests[-1]["model"] == "base"


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_any_model_server_will_do_for_recording(tmp_path: Path, kind: str) -> None:
    vllm = PlayedVllm(tmp_path)
    operators = ("weight_info", "is_paused", "pause", "resume", "collective_rpc", "tokenize", "v1/load_lora_adapter")
    vllm.refuses = {f"/{path}": 404 for path in (*operators, "v1/chat/completions/render")}
    vllm.returns_token_ids = kind == "vllm"
    known = {"name": "any", "kind": kind} | ({} if kind == "vllm" else {"model_map": {"policy": "base"}})
    with in_this_process(tmp_path, vllm, upstreams=[known]) as proxy:
        assert proxy.chat("r1").status == 200
        (call,) = proxy.rollout("r1")["calls"]
        assert (call["status"], call["trainable"]) == ("ok", kind == "vllm")
        assert proxy.get("/readyz")["status"] == "ready"


def test_an_upstream_without_a_key_of_its_own_gets_the_agents(tmp_path: Path) -> None:
    one = {"kind": "openai", "model_map": {"policy": "base"}}
    upstreams = [one | {"name": "policy"}, one | {"name": "own", "api_key": "upstreams", "models": ["base"]}]
    with in_this_process(tmp_path, upstreams=upstreams) as proxy:
        for model, sent, passed in (
            ("policy", "agents-own", "agents-own"), ("base", "agents-own", "upstreams"), ("base", None, "upstreams"),
        ):  # fmt: skip
            answer = proxy.post("/v1/chat/completions", CHAT | {"model": model}, sent, X_Rollout_Id="r1")
            headers = {name.lower(): value for name, value in proxy.vllm.requests[-1]["headers"].items()}
            assert (answer.status, headers["authorization"]) == (200, f"Bearer {passed}")
            shown = f"{proxy.rollout('r1')} {proxy.get('/status')} {answer.body!r}"
            assert "upstreams" not in shown and "agents-own" not in shown
            assert not [header for header in headers if header.startswith("x-rollout")]
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("*.db*"))
    assert b"agents-own" not in kept and b"Bearer" not in kept


def rollout_of(model: Scripted, key: str, *turn: Any, **more: str) -> str:
    """The rollout of a call without a name; conversations are looked for within one key."""
    return model.ask(*turn, Authorization=f"Bearer {key}", **more).headers["x-rollout-id"]


def test_conversations_of_other_keys_tasks_and_modes_do_not_mix(model: Scripted, name: str) -> None:
    others: list[tuple[str, Json]] = [
        ("a", {}), ("a", {"X_Task_Id": "u"}), ("a", {"X_Rollout_Mode": "eval"}), ("b", {}),
    ]  # fmt: skip
    first, follow = (
        [rollout_of(model, name + key, *turn, **{"X_Task_Id": "t"} | more) for key, more in others]
        for turn in (FIRST, FOLLOW)
    )
    assert first == follow and len({*first}) == 4


def test_a_response_is_known_by_its_id_and_by_its_conversation(model: Scripted, name: str) -> None:
    named = {"Authorization": f"Bearer {name}"}
    noon = {"type": "message", "id": "m_1", "role": "assistant", "content": [{"type": "output_text", "text": "noon"}]}
    first = model.ask(RESPONSES, {"input": [Q]}, [noon], **named)
    body = {"id": "resp_x", "status": "completed", "conversation": {"id": "conv_1"}, "output": []}
    for more in (
        {"previous_response_id": first.json["id"]}, {"conversation": "conv_1"}, {"conversation": {"id": "conv_1"}},
    ):  # fmt: skip
        answer = Wire([json.dumps(body).encode()], "application/json")
        found = model.ask(RESPONSES, {"input": "more"} | more, answer, **named)
        assert found.headers["x-rollout-id"] == first.headers["x-rollout-id"], more


def test_a_retry_of_a_first_request_goes_where_it_failed(model: Scripted, name: str) -> None:
    """Several agents ask the same at the same moment; two of them are refused, and their clients ask again."""

    def ask(answers: list[Any], **more: str) -> list[str]:
        held = together(len(answers))
        with ThreadPoolExecutor(4) as pool:
            return [*pool.map(lambda answer: rollout_of(model, name, *FIRST[:2], held(answer), **more), answers)]

    found, again = ask([DONE, 503, 503, DONE]), ask([DONE, DONE], x_stainless_retry_count="1")
    assert len({*found}) == 4 and {*again} == {*found[1:3]}


def test_conversations_go_on_through_another_proxy(models: list[Scripted], name: str) -> None:
    first = [rollout_of(models[0], name, *FIRST) for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        follow = pool.map(lambda i: rollout_of(models[i % 2], name, *FOLLOW), range(16))
    assert sorted(follow) == sorted(first), "never both with the same one"
