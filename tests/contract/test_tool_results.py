"""A tool's result belongs to the call that its own conversation made, whatever the ids (CONTRACT.md, section 3)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from contract.scripted import CHAT, MESSAGES, RESPONSES, Json, Scripted, results_of, said, scripted_twice, user


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Scripted]]:
    """Two proxies on one store."""
    with scripted_twice(tmp_path_factory.mktemp("results")) as both:
        yield both


@pytest.fixture
def model(models: list[Scripted]) -> Scripted:
    return models[0]


@pytest.fixture
def rollout() -> str:
    return uuid.uuid4().hex


def calls(*made: tuple[str | None, Any], name: str = "f", text: str | None = None) -> Json:
    """An answer with these calls: their ids and arguments."""
    functions = [{"name": name, "arguments": json.dumps(given)} for _, given in made]
    ids = [{} if call_id is None else {"id": call_id} for call_id, _ in made]
    tools = [{"type": "function", "function": f} | i for f, i in zip(functions, ids, strict=True)]
    return {"role": "assistant", "content": text, "tool_calls": tools}


def told(call_id: str | None, text: str, **more: Any) -> Json:
    return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id}) | more


def called(name: str) -> Json:
    return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": "{}"}}


DONE = said("done")
GO, X, N = user("go"), "X", "functions.get_the_current_weather:0"
SYSTEM = {"role": "system", "content": "You are one."}
OTHER = {"role": "system", "content": "You are another."}
# What smolagents writes down of the calls and the results of its tools.
WROTE = "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 1}}}]"
WROTE_TWO = WROTE[:-1] + ", {'id': 'call_2', 'type': 'function', 'function': {'name': 'f', 'arguments': {'a': 2}}}]"
# The ids are alike in all conversations. Each: turns, as in the cases, and the results.
CONVERSATIONS: dict[str, tuple[list[list[Any]], list[list[Any]]]] = {
    "a poll whose arguments never change": (
        [
            [[GO], calls((X, {}))],
            [[GO, calls((X, {})), told(X, "wait")], calls((X, {}))],
            [[GO, calls((X, {})), told(X, "wait"), calls((X, {})), told(X, "wait")], calls((X, {}))],
            [[GO, calls((X, {})), told(X, "wait"), calls((X, {})), told(X, "wait"), calls((X, {})), told(X, "ok")],
             DONE],
        ],
        [["wait"], ["wait"], ["ok"]],
    ),
    "results in another order than the calls": (
        [[[GO], calls(("a", {}), ("b", {}))],
         [[GO, calls(("a", {}), ("b", {})), told("b", "B"), told("a", "A")], DONE]],
        [["A", "B"]],
    ),
    "the second call alone, with an id that counts": (
        [[[GO], calls(("f:0", {"n": 1}), ("f:1", {"n": 2}))],
         [[GO, calls(("f:1", {"n": 2})), told("f:1", "2")], DONE]],
        [[None, "2"]],
    ),
    "a result that is shortened later": (
        [[[GO], calls((X, {"n": 1}))],
         [[GO, calls((X, {"n": 1})), told(X, "long")], calls((X, {"n": 2}))],
         [[GO, calls((X, {"n": 1})), told(X, "…"), calls((X, {"n": 2})), told(X, "2")], DONE]],
        [["long"], ["2"]],
    ),
    "results without ids": (
        [[[GO], calls((None, {"n": 1}), (None, {"n": 2}))],
         [[GO, calls((None, {"n": 1}), (None, {"n": 2})), told(None, "1"), told(None, "2")], DONE]],
        [["1", "2"]],
    ),
    "ids that the client wrote anew": (
        [[[GO], calls(("call_a", {"n": 1}), ("call_b", {"n": 2}))],
         [[GO, calls(("x1", {"n": 1}), ("x2", {"n": 2})), told("x2", "2"), told("x1", "1")], DONE]],
        [["1", "2"]],
    ),
    "agents that only their system's prompts tell apart": (
        [[[SYSTEM, GO], calls((X, {}))], [[OTHER, GO], calls((X, {}))],
         [[SYSTEM, GO, calls((X, {})), told(X, "one")], DONE],
         [[OTHER, GO, calls((X, {})), told(X, "other")], DONE]],
        [["one"], ["other"]],
    ),
    "agents that only their names tell apart": (
        [[[GO], calls((X, {})), "A"], [[GO], calls((X, {})), "B"], [[GO, calls((X, {})), told(X, "a")], DONE, "A"],
         [[GO, calls((X, {})), told(X, "b")], DONE, "B"]],
        [["a"], ["b"]],
    ),
    "agents that nothing tells apart, in their order": (
        [[[GO], calls((X, {}))], [[GO], calls((X, {}))], [[GO, calls((X, {})), told(X, "1")], DONE],
         [[GO, calls((X, {})), told(X, "2")], DONE]],
        [["1"], ["2"]],
    ),
    "a call without an answer before": (
        [[[GO], calls((X, {}))], [[GO, calls((X, {})), user("wait")], calls((X, {}))],
         [[GO, calls((X, {})), user("wait"), calls((X, {})), told(X, "2")], DONE]],
        [[None], ["2"]],
    ),
    "more calls than one in a turn, twice, with ids that count": (
        [[[GO], calls(("f:0", 1), ("f:1", 2))],
         [[GO, calls(("f:0", 1), ("f:1", 2)), told("f:0", "a"), told("f:1", "b")], calls(("f:0", 3), ("f:1", 4))],
         [[GO, calls(("f:0", 1), ("f:1", 2)), told("f:0", "a"), told("f:1", "b"), calls(("f:0", 3), ("f:1", 4)),
           told("f:1", "d"), told("f:0", "c")], DONE]],
        [["a", "b"], ["c", "d"]],
    ),
    "a window that slides": (
        [[[SYSTEM, GO], calls((X, {}))], [[SYSTEM, GO, calls((X, {})), told(X, "1")], calls((X, {}))],
         [[SYSTEM, calls((X, {})), told(X, "1"), calls((X, {})), told(X, "2")], calls((X, {}))],
         [[SYSTEM, calls((X, {})), told(X, "2"), calls((X, {})), told(X, "3")], DONE]],
        [["1"], ["2"], ["3"]],
    ),
    "an agent inside of another's call, on the same question": (
        [[[SYSTEM, GO], calls((X, {"q": "go"}))], [[OTHER, GO], calls((X, {"q": "go"}))],
         [[OTHER, GO, calls((X, {"q": "go"})), told(X, "inner")], DONE],
         [[SYSTEM, GO, calls((X, {"q": "go"})), told(X, "outer")], DONE]],
        [["outer"], ["inner"]],
    ),
    "an agent hands over before the result": (
        [[[SYSTEM, GO], calls((X, {"to": "B"})), "A"], [[user("else")], calls((X, {"to": "C"})), "B"],
         [[OTHER, GO, calls((X, {"to": "B"})), told(X, "over")], DONE, "B"]],
        [["over"], [None]],
    ),
    "a history that lost its beginning": (
        [[[GO], calls((X, {"n": 1}))], [[GO, calls((X, {"n": 1})), told(X, "1")], calls((X, {"n": 2}))],
         [[user("B")], calls((X, {"who": "B"}))],
         [[calls((X, {"n": 2})), told(X, "2")], DONE]],
        [["1"], ["2"], [None]],
    ),
    "a history that became a summary": (
        [[[GO], calls((X, {"n": 1}))], [[user("B")], calls((X, {"n": 2}))],
         [[user("So far: went."), calls((X, {"n": 1})), told(X, "1")], DONE]],
        [["1"], [None]],
    ),
    "a history without the calls": (
        [[[GO], calls((X, {"n": 1}))], [[user("B")], calls((X, {"n": 2}))], [[GO, told(X, "1")], DONE]],
        [["1"], [None]],
    ),
    "a call of a server of which nothing is recorded": (
        [[[GO], calls((X, {"n": 1}))], [[user("B"), calls((X, {"n": 7})), told(X, "7")], DONE]],
        [[None]],
    ),
    "arguments that the client mended": (
        [[[GO], calls((X, {"n": 1}))], [[user("B")], calls((X, {"n": 1}))],
         [[GO, calls((X, {"n": 1, "more": None})), told(X, "1")], DONE]],
        [["1"], [None]],
    ),
    "two calls of one answer, each with its result behind it": (
        [[[GO], calls((X, {}), (X, {}))], [[GO, calls((X, {})), told(X, "1"), calls((X, {})), told(X, "2")], DONE]],
        [["1", "2"]],
    ),
    "a result that comes after another turn": (
        [[[GO], calls(("a", {}), ("b", {}))],
         [[GO, calls(("a", {}), ("b", {})), told("a", "A")], calls(("c", {}))],
         [[GO, calls(("a", {}), ("b", {})), told("a", "A"), calls(("c", {})), told("c", "C"), told("b", "B")], DONE]],
        [["A", "B"], ["C"]],
    ),
    "text beside the call that the client dropped": (
        [[[user("B")], calls((X, {"n": 1}), text="Well,")], [[GO], calls((X, {"n": 1}), text="Well,")],
         [[user("B"), calls((X, {"n": 1})), told(X, "b")], DONE]],
        [["b"], [None]],
    ),
    "arguments as an object": (
        [[[GO], {"role": "assistant", "content": None, "tool_calls": [{"id": X, "function": {"name": "f", "arguments":
          {"n": 1}}}]}],
         [[user("B")], calls((X, {"n": 2}))],
         [[GO, calls((X, {"n": 1})), told(X, "1")], DONE]],
        [["1"], [None]],
    ),
    "a result in a text": (
        [[[GO], calls(("call_1", {"a": 1}))],
         [[GO, said(f"So:\n{WROTE}"), user("Observation:\n3\nNew task:\nAnd now?")], DONE]],
        [["3"]],
    ),
    "an error in a text": (
        [[[GO], calls(("call_1", {"a": 1}))],
         [[GO, said(WROTE), user("Call id: call_1\nError:\nno such tool\nNow let's retry")], DONE]],
        [["no such tool\nNow let's retry"]],
    ),
    "a text of which nobody can say whose result it is": (
        [[[GO], calls(("call_1", {"a": 1}), ("call_2", {"a": 2}))],
         [[GO, said(WROTE_TWO), user("Observation:\n3\n4")], DONE]],
        [[None, None]],
    ),
    "a question about a result": (
        [[[GO], calls(("call_1", {"a": 1}))], [[GO, said(WROTE), user("What does the Observation:\n3 mean?")], DONE]],
        [[None]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("proxies", [1, 2])
def test_a_result_is_given_to_the_call_that_stands_before_it(
    name: str, proxies: int, models: list[Scripted], rollout: str
) -> None:
    turns, results = CONVERSATIONS[name]
    for i, turn in enumerate(turns):
        found = models[i % proxies].results(rollout, [turn])
    assert found == results


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


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
@pytest.mark.parametrize("way", ["whole", "previous_response_id", "item_reference"])
def test_items_of_responses_are_matched_within_their_conversation(
    kind: str, way: str, model: Scripted, rollout: str
) -> None:
    made, given, named = {}, {}, {"X_Rollout_Id": rollout}
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
    assert results_of(model.proxy.rollout(rollout)) == [["A1", "A2"], ["B1", "B2"]]


@pytest.mark.parametrize(
    ("made", "name", "arguments"),
    [
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, "shell", '{"commands":["ls"]}'),
        ({"type": "local_shell_call", "action": {"command": ["ls"]}}, "local_shell", '{"command":["ls"]}'),
        ({"type": "apply_patch_call", "operation": {"path": "a"}}, "apply_patch", '{"path":"a"}'),
        ({"type": "computer_call", "action": None, "actions": [{"type": "wait"}]}, "computer", '[{"type":"wait"}]'),
    ],
)
def test_tools_that_openai_defines_are_tools_and_those_that_the_server_runs_are_not(
    made: Json, name: str, arguments: str, model: Scripted, rollout: str
) -> None:
    by_the_server = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}}
    made |= {"id": "x", "call_id": "call_1"}
    model.ask(RESPONSES, {"input": "go"}, [by_the_server, made], X_Rollout_Id=rollout)
    place = {"id": "call_1"} if made["type"] == "local_shell_call" else {"call_id": "call_1"}
    result = {"type": f"{made['type']}_output", "output": "done"} | place
    model.ask(RESPONSES, {"input": [user("go"), made, result]}, [], X_Rollout_Id=rollout)
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


def test_many_agents_that_count_alike_at_once(models: list[Scripted], rollout: str) -> None:
    """More than are kept in memory, by two proxies in turn, three turns each."""
    histories = {f"{i}": [user(f"task {i}")] for i in range(12)}
    for turn in range(3):
        for i, (who, history) in enumerate(histories.items()):
            answer = calls((N, {"turn": turn}))
            models[i % 2].ask(CHAT, {"messages": history}, answer, X_Rollout_Id=rollout)
            history += [answer, told(N, f"{who} in {turn}")]
    for i, history in enumerate(histories.values()):
        models[(i + 1) % 2].ask(CHAT, {"messages": history}, DONE, X_Rollout_Id=rollout)
    expected = [[f"{i} in {turn}"] for turn in range(3) for i in range(12)]
    assert results_of(models[0].proxy.rollout(rollout)) == expected
