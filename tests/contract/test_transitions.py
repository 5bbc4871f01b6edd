"""CONTRACT.md, section 3: a rollout as a Markov decision process, and what the record has of each call."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

from contract.scripted import CHAT, Scripted, calls, said, scripted, told, user
from contract.system import Proxy, free_port

GO, DONE = user("go"), said("done")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def transitions(proxy: Proxy, rollout: str) -> Any:
    found = proxy.get(f"/rollouts/{rollout}/transitions?requests=whole")["data"]
    assert [one["t"] for one in found] == list(range(len(found)))
    return found


def test_each_call_and_each_result_is_a_transition(model: Scripted, rollout: str) -> None:
    both, one = calls(("a", {"n": 1}), ("b", {"n": 2})), calls(("c", {}))
    first = [GO]
    second = [*first, both, told("b", "B"), told("a", "A")]
    third = [*second, one]  # "c" never has a result
    for messages, answer, agent in ((first, both, "alice"), (second, one, "bob"), (third, DONE, "alice")):
        model.ask(CHAT, {"messages": messages, "tools": TOOLS}, answer, X_Rollout_Id=rollout, X_Agent_Name=agent)
    ids = [call["call_id"] for call in model.proxy.rollout(rollout)["calls"]]
    assert [one["done"] for one in transitions(model.proxy, rollout)] == [False] * 5, "it is running"
    model.proxy.reward(rollout, 0.25, call_id=ids[0])
    model.proxy.reward(rollout, 1)
    found = transitions(model.proxy, rollout)
    assert " ".join(found[0]) == "t kind agent call_id state action reward next_state done"
    states = [{"messages": messages, "tools": TOOLS, "prompt_token_ids": []} for messages in (first, second, third)]
    actions = [{"message": message, "token_ids": [], "finish_reason": "stop"} for message in (both, one, DONE)]
    made = [{"id": i, "name": "f", "arguments": a} for i, a in (("a", '{"n": 1}'), ("b", '{"n": 2}'))]
    results = [{"result": text, "is_error": False} for text in "AB"]
    assert [[*one.values()] for one in found] == [
        [0, "llm", "alice", ids[0], states[0], actions[0], 0.25, states[1], False],
        [1, "tool", "alice", ids[0], both, made[0], 0, results[0], False],
        [2, "tool", "alice", ids[0], both, made[1], 0, results[1], False],
        [3, "llm", "bob", ids[1], states[1], actions[1], 0, states[2], False],
        [4, "llm", "alice", ids[2], states[2], actions[2], 1, None, True],
    ]


def test_what_an_agent_posts_of_its_own_steps_is_a_transition(proxy: Proxy, rollout: str) -> None:
    state = {"kind": "state", "agent": "solver", "value": {"page": 2}}
    action = {"kind": "action", "agent": "solver", "name": "turn", "arguments": {"n": 1}, "result": "page 3"}
    events = [state, state | {"agent": "other", "value": 7}, action, {"kind": "note", "value": "x"}]
    assert proxy.post(f"/rollouts/{rollout}/events", events).status == 200
    proxy.chat(rollout)
    step, call = transitions(proxy, rollout)
    assert step == {
        "t": 0, "kind": "tool", "agent": "solver", "call_id": None, "state": {"page": 2}, "reward": 0, "done": False,
        "action": {"id": None, "name": "turn", "arguments": {"n": 1}},
        "next_state": {"result": "page 3", "is_error": False},
    }  # fmt: skip
    assert call["kind"] == "llm"


def test_a_call_that_failed_is_in_the_record_and_is_no_decision(model: Scripted, rollout: str) -> None:
    model.ask(CHAT, {"messages": [GO]}, DONE, X_Rollout_Id=rollout)
    with model.script(500) as scripted:
        headers, url = {"X-Script": scripted["X_Script"]}, f"{model.proxy.url}/rollouts/{rollout}/v1"
        its_own = openai.OpenAI(base_url=url, api_key="k", max_retries=1, default_headers=headers)
        with its_own as client, pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "more"}])
    first, failed, again = model.proxy.rollout(rollout)["calls"]
    assert (failed["status"], failed["error"], failed["trainable"]) == ("error", "the upstream answered 500", False)
    assert failed["response"] == {"error": {"message": "busy"}}
    assert (failed["superseded_by"], again["superseded_by"]) == (again["call_id"], None), "the client's own retry"
    (only,) = transitions(model.proxy, rollout)
    assert (only["call_id"], only["next_state"]) == (first["call_id"], None)


def test_a_request_that_the_client_sends_again_is_one_decision(proxy: Proxy, rollout: str) -> None:
    path, body = f"/rollouts/{rollout}{CHAT}", {"model": "policy", "messages": [GO]}
    for count, mode in (("0", "train"), ("1", "eval"), ("2", "train"), ("0", "train")):  # at last it asks by itself
        assert proxy.post(path, body, X_Stainless_Retry_Count=count, X_Rollout_Mode=mode).status == 200
    assert proxy.rollout(rollout)["mode"] == "eval", "once an evaluation, always one"
    found = proxy.rollout(rollout)["calls"]
    ids = [call["call_id"] for call in found]
    assert [call["superseded_by"] for call in found] == [ids[1], ids[2], None, None]
    assert [call["trainable"] for call in found] == [False, False, True, True]
    assert [one["call_id"] for one in transitions(proxy, rollout)] == ids[2:]


def test_a_retry_takes_the_place_of_what_failed_or_else_of_the_last_answer(model: Scripted) -> None:
    for answers, place in (([DONE, 500, DONE], 1), ([DONE, DONE], 1), ([500, DONE], 0)):
        rollout = uuid.uuid4().hex
        for answer in answers:
            model.ask(CHAT, {"messages": [GO]}, answer, X_Rollout_Id=rollout)
        model.ask(CHAT, {"messages": [GO]}, DONE, X_Rollout_Id=rollout, X_Stainless_Retry_Count="1")
        *before, retry = model.proxy.rollout(rollout)["calls"]
        assert [i for i, call in enumerate(before) if call["superseded_by"] == retry["call_id"]] == [place]
    rollout = uuid.uuid4().hex
    for text, count in (("same", "0"), ("other", "0"), ("same", "1")):
        model.ask(CHAT, {"messages": [user(text)]}, DONE, X_Rollout_Id=rollout, X_Stainless_Retry_Count=count)
    assert len(transitions(model.proxy, rollout)) == 3, "after another request it takes no answered call's place"
    called, named = calls(("X", {})), {"X_Rollout_Id": uuid.uuid4().hex}
    follow = [GO, called, told("X", "1")]
    for messages, answer, count in (([GO], called, "0"), ([GO], called, "1"), (follow, 503, "0"), (follow, DONE, "1")):
        model.ask(CHAT, {"messages": messages}, answer, X_Stainless_Retry_Count=count, **named)
    assert model.results(named["X_Rollout_Id"], []) == [[None], ["1"]], "the agent was answered by the second"


def test_a_retry_of_the_proxy_and_a_fallback_add_no_call(tmp_path: Path, rollout: str) -> None:
    away = {"name": "away", "kind": "openai", "base_url": f"http://127.0.0.1:{free_port()}/v1", "models": ["m"]}
    with scripted(tmp_path, upstreams=[{"name": "policy"}, away | {"retries": 1, "fallbacks": ["policy"]}]) as model:
        model.ask(CHAT, {"messages": [GO]}, DONE, X_Rollout_Id=rollout)
        (call,) = model.proxy.rollout(rollout)["calls"]
        assert (call["status"], call["upstream"]) == ("ok", "policy")
        assert len(transitions(model.proxy, rollout)) == 1


def test_requests_are_read_back_as_they_were_sent(model: Scripted) -> None:
    same = [[{"strict": v}, {"turn": t}] for t, v in enumerate([True, 1, True, 1.0, 1])]  # to Python they are equal
    branches = [[user(text) for text in history] for history in ("a", "ab", "ac", "abd", "x", "", "abde")]
    sizes = [[user("ä" * length)] for length in (10, 4_000, 100_000)]
    odd: list[Any] = [[user("\ud800")], [user("\ud800"), {"seed": 2**80}]]
    for histories in (same, branches, sizes, odd):
        rollout = uuid.uuid4().hex
        for messages in histories:
            model.ask(CHAT, {"messages": messages}, DONE, X_Rollout_Id=rollout)
        found, states = model.proxy.rollout(rollout)["calls"], transitions(model.proxy, rollout)
        assert json.dumps([call["request"]["messages"] for call in found]) == json.dumps(histories)
        assert json.dumps([one["state"]["messages"] for one in states]) == json.dumps(histories)
        assert [call["seq"] for call in found] == list(range(len(found)))
