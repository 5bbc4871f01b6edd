"""CONTRACT.md, section 3: a rollout as a Markov decision process, and what the record has of each call."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

from contract.scripted import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Json,
    Scripted,
    Wire,
    calls,
    results_of,
    said,
    scripted,
    told,
    user,
)
from contract.system import Proxy, free_port

GO, DONE = user("go"), said("done")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def transitions(proxy: Proxy, rollout: str) -> list[Json]:
    found: list[Json] = proxy.get(f"/rollouts/{rollout}/transitions?requests=whole")["data"]
    assert [one["t"] for one in found] == list(range(len(found)))
    return found


# Transitions


def test_each_call_and_each_result_is_a_transition(model: Scripted, rollout: str) -> None:
    both, one = calls(("a", {"n": 1}), ("b", {"n": 2})), calls(("c", {}))
    first = [GO]
    second = [*first, both, told("b", "B"), told("a", "A")]
    third = [*second, one]  # "c" never has a result
    for messages, answer in ((first, both), (second, one), (third, DONE)):
        model.ask(CHAT, {"messages": messages, "tools": TOOLS}, answer, X_Rollout_Id=rollout, X_Agent_Name="solver")
    ids = [call["call_id"] for call in model.proxy.rollout(rollout)["calls"]]
    assert [one["done"] for one in transitions(model.proxy, rollout)] == [False] * 5, "it is running"
    model.proxy.post("/reward", {"rollout_id": rollout, "reward": 0.25, "call_id": ids[0]})
    model.proxy.post("/reward", {"rollout_id": rollout, "reward": 1})
    found = transitions(model.proxy, rollout)
    assert found[0].keys() == {"t", "kind", "agent", "call_id", "state", "action", "reward", "next_state", "done"}
    places = [(one["kind"], one["agent"], one["call_id"]) for one in found]
    assert places == [("llm", "solver", ids[0]), *[("tool", "solver", ids[0])] * 2,
                      ("llm", "solver", ids[1]), ("llm", "solver", ids[2])]  # fmt: skip
    states = [{"messages": messages, "tools": TOOLS, "prompt_token_ids": []} for messages in (first, second, third)]
    assert [one["state"] for one in found] == [states[0], both, both, states[1], states[2]]
    following = [{"result": text, "is_error": False} for text in "AB"]
    assert [one["next_state"] for one in found] == [states[1], *following, states[2], None]
    made = [{"id": i, "name": "f", "arguments": a} for i, a in (("a", '{"n": 1}'), ("b", '{"n": 2}'))]
    llm = [{"message": m, "token_ids": [], "finish_reason": "stop"} for m in (both, one, DONE)]
    assert [one["action"] for one in found] == [llm[0], *made, llm[1], llm[2]]
    assert [one["reward"] for one in found] == [0.25, 0, 0, 0, 1]
    assert [one["done"] for one in found] == [False, False, False, False, True]


def test_agents_that_take_turns_have_transitions_in_the_order_of_their_calls(model: Scripted, rollout: str) -> None:
    for agent in ("alice", "bob", "alice"):
        model.ask(CHAT, {"messages": [user(agent)]}, said(f"I am {agent}"), X_Rollout_Id=rollout, X_Agent_Name=agent)
    found = transitions(model.proxy, rollout)
    assert [(one["agent"], one["action"]["message"]["content"]) for one in found] == [
        ("alice", "I am alice"), ("bob", "I am bob"), ("alice", "I am alice"),
    ]  # fmt: skip
    assert model.proxy.get("/rollouts?agent=bob&limit=1")["data"][0]["rollout_id"] == rollout


def test_what_an_agent_posts_of_its_own_steps_is_a_transition_of_the_state_that_it_posted(
    proxy: Proxy, rollout: str
) -> None:
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
    model.ask(CHAT, {"messages": [GO, DONE, user("more")]}, 500, X_Rollout_Id=rollout)
    first, failed = model.proxy.rollout(rollout)["calls"]
    assert (failed["status"], failed["error"], failed["trainable"]) == ("error", "the upstream answered 500", False)
    assert failed["response"] == {"error": {"message": "busy"}}
    (only,) = transitions(model.proxy, rollout)
    assert (only["call_id"], only["next_state"]) == (first["call_id"], None)


# One decision is one transition


def test_a_request_that_the_client_sends_again_is_one_decision(proxy: Proxy, rollout: str) -> None:
    path, body = f"/rollouts/{rollout}{CHAT}", {"model": "policy", "messages": [GO]}
    for count in ("0", "1", "2", "0"):  # at last the agent asks again by itself
        assert proxy.post(path, body, X_Stainless_Retry_Count=count).status == 200
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


def test_the_openai_clients_own_retry_is_one_decision(model: Scripted, rollout: str) -> None:
    with model.script(503) as scripted:
        headers = {"X-Script": scripted["X_Script"]}
        url = f"{model.proxy.url}/rollouts/{rollout}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="k", max_retries=1, default_headers=headers) as client,
            pytest.raises(openai.InternalServerError),
        ):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    first, second = model.proxy.rollout(rollout)["calls"]
    assert (first["superseded_by"], second["superseded_by"]) == (second["call_id"], None)


def test_a_retry_of_the_proxy_and_a_fallback_add_no_call(tmp_path: Path, rollout: str) -> None:
    away = {"name": "away", "kind": "openai", "base_url": f"http://127.0.0.1:{free_port()}/v1", "models": ["m"]}
    with scripted(tmp_path, upstreams=[{"name": "policy"}, away | {"retries": 1, "fallbacks": ["policy"]}]) as model:
        model.ask(CHAT, {"messages": [GO]}, DONE, X_Rollout_Id=rollout)
        (call,) = model.proxy.rollout(rollout)["calls"]
        assert (call["status"], call["upstream"]) == ("ok", "policy")
        assert len(transitions(model.proxy, rollout)) == 1


# What the record has of a call, in each dialect, streamed or not

FIELDS = {
    "call_id", "seq", "agent", "endpoint", "status", "model", "policy_version", "request", "response",
    "prompt_token_ids", "response_token_ids", "logprobs", "finish_reason", "usage", "tool_calls", "reward", "trainable",
    "untrainable_reason", "superseded_by", "policy_versions", "started_at", "ttft_ms", "latency_ms",
}  # fmt: skip
COUNTS = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
COUNTED = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
TOP = {"id": "c1", "created": 1, "model": "m"}
CALLED = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
ITEM = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a":1}',
        "status": "completed"}  # fmt: skip
USED = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
# By dialect: the request, the whole answer, and the events that say the same.
DIALECTS: dict[str, tuple[Json, Json, list[Json]]] = {
    CHAT: (
        {"messages": [GO]},
        TOP | {"object": "chat.completion", "usage": COUNTS, "choices": [
            {"index": 0, "message": said("hi", tool_calls=CALLED), "finish_reason": "tool_calls"}]},
        [TOP | {"object": "chat.completion.chunk"} | one for one in (
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "h"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {"content": "i"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **CALLED[0]}]}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
            {"choices": [], "usage": COUNTS})],
    ),
    COMPLETIONS: (
        {"prompt": "go"},
        TOP | {"object": "text_completion", "usage": COUNTS,
               "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]},
        [TOP | {"object": "text_completion"} | one for one in (
            {"choices": [{"index": 0, "text": "h", "finish_reason": None}]},
            {"choices": [{"index": 0, "text": "i", "finish_reason": "stop"}]},
            {"choices": [], "usage": COUNTS})],
    ),
    MESSAGES: (
        {"messages": [GO], "max_tokens": 9},
        MESSAGE | {"content": [{"type": "text", "text": "hi"}, USED], "stop_reason": "tool_use", "usage": COUNTED},
        [{"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None,
                                                         "usage": COUNTED | {"output_tokens": 0}}},
         {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
         {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
         {"type": "content_block_stop", "index": 0},
         {"type": "content_block_start", "index": 1, "content_block": USED | {"input": {}}},
         {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a":1}'}},
         {"type": "content_block_stop", "index": 1},
         {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
         {"type": "message_stop"}],
    ),
    RESPONSES: (
        {"input": "go"},
        RESPONSE | {"status": "completed", "output": [ITEM], "usage": COUNTED},
        [{"type": "response.created", "response": RESPONSE | {"status": "in_progress", "output": []}},
         {"type": "response.output_item.done", "output_index": 0, "item": ITEM},
         {"type": "response.completed", "response": RESPONSE | {"status": "completed", "output": [ITEM],
                                                                "usage": COUNTED}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_all_its_fields_and_a_streamed_answer_is_the_whole_object(stream: bool, model: Scripted) -> None:
    for path in DIALECTS:
        check_call(path, stream, model)


def check_call(path: str, stream: bool, model: Scripted) -> None:
    rollout = uuid.uuid4().hex
    request, whole, events = DIALECTS[path]
    body = {"model": "m", "stream": stream} | request
    text = [f"event: {one.get('type')}\ndata: {json.dumps(one)}\n\n" for one in events]
    text += ["data: [DONE]\n\n"] if "choices" in whole else []
    answer = Wire([one.encode() for one in text]) if stream else Wire([json.dumps(whole).encode()], "application/json")
    model.ask(f"/rollouts/{rollout}/agents/solver{path}", body, answer)
    (call,) = model.proxy.rollout(rollout)["calls"]
    assert call.keys() >= FIELDS
    assert (call["seq"], call["agent"], call["endpoint"]) == (0, "solver", path.removeprefix("/v1/"))
    assert (call["status"], call["model"], call["request"], call["response"]) == ("ok", "m", body, whole)
    assert call["usage"] == whole["usage"] and call["finish_reason"] in ("stop", "tool_calls", "tool_use")
    made = [{"id": "call_1", "name": "f", "arguments": {"a": 1}, "result": None, "is_error": None}]
    found = [one | {"arguments": json.loads(one["arguments"])} for one in call["tool_calls"]]
    assert found == ([] if path == COMPLETIONS else made)
    assert 0 <= (call["ttft_ms"] or 0) <= call["latency_ms"] and (call["ttft_ms"] is not None) is stream
    assert (call["prompt_token_ids"], call["response_token_ids"], call["logprobs"]) == ([], [], [])
    assert call["trainable"] is False and call["untrainable_reason"] and call["policy_version"] is None
    (only,) = transitions(model.proxy, rollout)
    shown = {name: request[name] for name in request if name != "max_tokens"}
    assert only["state"] == shown | {"prompt_token_ids": []}


HISTORIES: dict[str, list[Any]] = {
    "values that Python takes for equal": [[{"strict": v}, {"turn": t}] for t, v in enumerate([True, 1, True, 1.0, 1])],
    "branches and edits": [
        [user(text) for text in history]
        for history in (["a"], ["a", "b"], ["a", "c"], ["a", "b", "d"], ["x"], [], ["a", "b", "d", "e"])
    ],
    "of all sizes": [[user("ä" * length)] for length in (10, 4_000, 100_000)],
    "half characters and huge numbers": [[user("\ud800")], [user("\ud800"), {"seed": 2**80}]],
}


def test_requests_are_read_back_as_they_were_sent(model: Scripted) -> None:
    for name, histories in HISTORIES.items():
        rollout = uuid.uuid4().hex
        for messages in histories:
            model.ask(CHAT, {"messages": messages}, DONE, X_Rollout_Id=rollout)
        found, states = model.proxy.rollout(rollout)["calls"], transitions(model.proxy, rollout)
        assert json.dumps([call["request"]["messages"] for call in found]) == json.dumps(histories), name
        assert json.dumps([one["state"]["messages"] for one in states]) == json.dumps(histories), name
        assert [call["seq"] for call in found] == list(range(len(found)))


def test_once_an_evaluation_always_one(proxy: Proxy, rollout: str) -> None:
    for mode in ("train", "eval", "train"):
        body = {"model": "policy", "messages": [GO]}
        assert proxy.post(CHAT, body, X_Rollout_Id=rollout, X_Rollout_Mode=mode).status == 200
    assert proxy.rollout(rollout)["mode"] == "eval"


# Tools' results

X = "X"


def use(call_id: str, **given: Any) -> Json:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": given}


def used(call_id: str, text: str) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


def test_blocks_of_messages_are_matched_within_their_conversation(model: Scripted, rollout: str) -> None:
    named, both = {"X_Rollout_Id": rollout}, [use("t:0", n=1), use("t:0", n=2)]
    model.ask(MESSAGES, {"system": "s", "messages": [GO]}, both, **named)
    model.ask(MESSAGES, {"messages": [user("B")]}, [use("t:0", n=3)], **named)
    history = [GO, {"role": "assistant", "content": both}]
    back = [used("t:0", "1"), {"type": "text", "text": "Hurry."}, used("t:0", "2") | {"is_error": True}]
    model.ask(MESSAGES, {"system": "s2", "messages": [*history, {"role": "user", "content": back}]}, [], **named)
    found = model.proxy.rollout(rollout)
    assert results_of(found) == [["1", "2"], [None]]
    assert [tool["is_error"] for tool in found["calls"][0]["tool_calls"]] == [False, True]


def item(kind: str, call_id: str, item_id: str, given: str) -> Json:
    field = {"custom_tool_call": "input"}.get(kind, "arguments")
    return {"type": kind, "id": item_id, "call_id": call_id, "name": "f", field: given}


def output(kind: str, call_id: str, text: str) -> Json:
    return {"type": f"{kind}_output", "call_id": call_id, "output": text}


@pytest.mark.parametrize("way", ["whole", "previous_response_id", "item_reference"])
def test_items_of_responses_are_matched_within_their_conversation(way: str, model: Scripted) -> None:
    for kind in ("function_call", "custom_tool_call"):
        made, given, named = {}, {}, {"X_Rollout_Id": uuid.uuid4().hex}
        for who in ("A", "B"):
            given[who] = [item(kind, "c:0", f"fc_{who}{i}", f'{{"n":{i}}}') for i in (1, 2)]
            made[who] = model.ask(RESPONSES, {"input": who}, given[who], **named).json
        for who in ("A", "B"):
            results = [output(kind, "c:0", f"{who}{i}") for i in (1, 2)]
            sent: Json = {"input": [user(who), *given[who], *results]}
            if way == "previous_response_id":
                sent = {"input": results, "previous_response_id": made[who]["id"]}
            if way == "item_reference":
                sent = {"input": [{"type": "item_reference", "id": one["id"]} for one in given[who]] + results}
            model.ask(RESPONSES, sent, [], **named)
        assert results_of(model.proxy.rollout(named["X_Rollout_Id"])) == [["A1", "A2"], ["B1", "B2"]], kind


def test_tools_that_openai_defines_are_tools_and_those_that_the_server_runs_are_not(model: Scripted) -> None:
    by_the_server = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}}
    defined: list[tuple[Json, str, str]] = [
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, "shell", '{"commands":["ls"]}'),
        ({"type": "local_shell_call", "action": {"command": ["ls"]}}, "local_shell", '{"command":["ls"]}'),
        ({"type": "apply_patch_call", "operation": {"path": "a"}}, "apply_patch", '{"path":"a"}'),
        ({"type": "computer_call", "action": None, "actions": [{"type": "wait"}]}, "computer", '[{"type":"wait"}]'),
    ]
    for made, name, arguments in defined:
        rollout, call = uuid.uuid4().hex, made | {"id": "x", "call_id": "call_1"}
        model.ask(RESPONSES, {"input": "go"}, [by_the_server, call], X_Rollout_Id=rollout)
        place = {"id": "call_1"} if made["type"] == "local_shell_call" else {"call_id": "call_1"}
        result = {"type": f"{made['type']}_output", "output": "done"} | place
        model.ask(RESPONSES, {"input": [user("go"), call, result]}, [], X_Rollout_Id=rollout)
        (tool,) = model.proxy.rollout(rollout)["calls"][0]["tool_calls"]
        assert (tool["id"], tool["name"], tool["arguments"], tool["result"]) == ("call_1", name, arguments, "done")


def test_a_client_that_sends_the_request_again_changes_nothing(model: Scripted, rollout: str) -> None:
    named, again = {"X_Rollout_Id": rollout}, {"x_stainless_retry_count": "1"}
    model.ask(CHAT, {"messages": [GO]}, calls((X, {})), **named)
    model.ask(CHAT, {"messages": [GO]}, calls((X, {})), **named, **again)
    follow = {"messages": [GO, calls((X, {})), told(X, "1")]}
    model.ask(CHAT, follow, 503, **named)
    model.ask(CHAT, follow, DONE, **named, **again)
    assert results_of(model.proxy.rollout(rollout)) == [[None], ["1"]]  # the agent was answered by the second
