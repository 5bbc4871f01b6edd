"""A tool's result belongs to the call that its own conversation made, whatever the ids (CONTRACT.md, section 3)."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from contract.scripted import CHAT, MESSAGES, RESPONSES, Json, Scripted, calls, results_of, said, told, user

DONE = said("done")
GO, X = user("go"), "X"


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
