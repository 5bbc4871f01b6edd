"""CONTRACT.md, section 3: a rollout as a Markov decision process, and what the record has of each call."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import openai
import pytest

from contract.scripted import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Scripted, Wire, calls, said, scripted, told, user
from contract.system import Json, Proxy, free_port

GO, DONE = user("go"), said("done")
FIELDS = """
call_id seq agent endpoint status model policy_version request response prompt_token_ids response_token_ids logprobs
finish_reason usage tool_calls reward trainable untrainable_reason superseded_by policy_versions started_at ttft_ms
latency_ms
"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
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


def transitions(proxy: Proxy, rollout: str) -> Any:
    found = proxy.get(f"/rollouts/{rollout}/transitions?requests=whole")["data"]
    assert [one["t"] for one in found] == list(range(len(found)))
    return found


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
    turns = uuid.uuid4().hex
    for agent in ("alice", "bob", "alice"):
        model.ask(CHAT, {"messages": [user(agent)]}, said(f"I am {agent}"), X_Rollout_Id=turns, X_Agent_Name=agent)
    spoken = [(one["agent"], one["action"]["message"]["content"]) for one in transitions(model.proxy, turns)]
    assert spoken == [(agent, f"I am {agent}") for agent in ("alice", "bob", "alice")]


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


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_all_fields_and_a_stream_is_whole(stream: bool, path: str, model: Scripted, rollout: str) -> None:
    request, whole, events = DIALECTS[path]
    body = {"model": "m", "stream": stream} | request
    text = [f"event: {one.get('type')}\ndata: {json.dumps(one)}\n\n" for one in events]
    text += ["data: [DONE]\n\n"] if "choices" in whole else []
    answer = Wire([one.encode() for one in text]) if stream else Wire([json.dumps(whole).encode()], "application/json")
    model.ask(f"/rollouts/{rollout}/agents/solver{path}", body, answer)
    (call,) = model.proxy.rollout(rollout)["calls"]
    assert call.keys() >= {*FIELDS.split()}
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


def test_blocks_of_messages_are_matched_within_their_conversation(model: Scripted, rollout: str) -> None:
    named, use = {"X_Rollout_Id": rollout}, {"type": "tool_use", "id": "t:0", "name": "f"}
    both, used = [use | {"input": {"n": n}} for n in (1, 2)], {"type": "tool_result", "tool_use_id": "t:0"}
    model.ask(MESSAGES, {"system": "s", "messages": [GO]}, both, **named)
    model.ask(MESSAGES, {"messages": [user("B")]}, [use | {"input": {"n": 3}}], **named)
    back = [used | {"content": "1"}, {"type": "text", "text": "Hurry."}, used | {"content": "2", "is_error": True}]
    history = [GO, {"role": "assistant", "content": both}, {"role": "user", "content": back}]
    model.ask(MESSAGES, {"system": "s2", "messages": history}, [], **named)
    assert model.results(rollout, []) == [["1", "2"], [None]]
    assert [tool["is_error"] for tool in model.proxy.rollout(rollout)["calls"][0]["tool_calls"]] == [False, True]


@pytest.mark.parametrize("way", ["whole", "previous_response_id", "item_reference"])
def test_items_of_responses_are_matched_within_their_conversation(way: str, model: Scripted) -> None:
    for kind, field in (("function_call", "arguments"), ("custom_tool_call", "input")):
        made, given, named = {}, {}, {"X_Rollout_Id": uuid.uuid4().hex}
        for who in ("A", "B"):
            call = {"type": kind, "call_id": "c:0", "name": "f"}
            given[who] = [call | {"id": f"fc_{who}{i}", field: f'{{"n":{i}}}'} for i in (1, 2)]
            made[who] = model.ask(RESPONSES, {"input": who}, given[who], **named).json
        for who in ("A", "B"):
            results = [{"type": f"{kind}_output", "call_id": "c:0", "output": f"{who}{i}"} for i in (1, 2)]
            sent: Json = {"input": [user(who), *given[who], *results]}
            if way == "previous_response_id":
                sent = {"input": results, "previous_response_id": made[who]["id"]}
            if way == "item_reference":
                sent = {"input": [{"type": "item_reference", "id": one["id"]} for one in given[who]] + results}
            model.ask(RESPONSES, sent, [], **named)
        assert model.results(named["X_Rollout_Id"], []) == [["A1", "A2"], ["B1", "B2"]], kind


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
