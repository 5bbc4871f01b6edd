"""A tool's result belongs to the call that its own conversation made, whatever the ids."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from support.cases import Case, cases_with
from support.scripted import CHAT, MESSAGES, RESPONSES, Proxy, scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxies(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sequence[Proxy]]:
    async with scripted(tmp_path_factory.mktemp("results"), proxies=2) as found:
        yield found


@pytest.fixture
def proxy(proxies: Sequence[Proxy]) -> Proxy:
    return proxies[0]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


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


DONE = {"role": "assistant", "content": "done"}
GO, X, N = user("go"), "X", "functions.get_the_current_weather:0"
SYSTEM = {"role": "system", "content": "You are one."}
OTHER = {"role": "system", "content": "You are another."}
# The ids are alike in all conversations. Each: turns, as in the cases, and the results.
OWN: dict[str, tuple[list[list[Any]], list[list[Any]]]] = {
    "three answers that count alike": (
        [
            [[GO], calls((N, {"n": 1}))],
            [[GO, calls((N, {"n": 1})), told(N, "1")], calls((N, {"n": 2}))],
            [[GO, calls((N, {"n": 1})), told(N, "1"), calls((N, {"n": 2})), told(N, "2")], calls((N, {"n": 3}))],
            [[GO, calls((N, {"n": 1})), told(N, "1"), calls((N, {"n": 2})), told(N, "2"), calls((N, {"n": 3})),
              told(N, "3")], DONE],
        ],
        [["1"], ["2"], ["3"]],
    ),
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
    "equal calls with equal ids in a turn": (
        [[[GO], calls((X, {}), (X, {}), (X, {}))],
         [[GO, calls((X, {}), (X, {}), (X, {})), told(X, "same"), told(X, "same"), told(X, "other")], DONE]],
        [["same", "same", "other"]],
    ),
    "one of two results with one id, and the other later": (
        [[[GO], calls((X, {}), (X, {}))],
         [[GO, calls((X, {}), (X, {})), told(X, "a")], DONE],
         [[GO, calls((X, {}), (X, {})), told(X, "a"), told(X, "b")], DONE]],
        [["a", "b"]],
    ),
    "results in another order than the calls": (
        [[[GO], calls(("a", {}), ("b", {}))],
         [[GO, calls(("a", {}), ("b", {})), told("b", "B"), told("a", "A")], DONE]],
        [["A", "B"]],
    ),
    "calls that the client sends in another order, with ids that count": (
        [[[GO], calls(("f:0", {"n": 1}), ("f:1", {"n": 2}))],
         [[GO, calls(("f:1", {"n": 2}), ("f:0", {"n": 1})), told("f:1", "2"), told("f:0", "1")], DONE]],
        [["1", "2"]],
    ),
    "the second call alone, with an id that counts": (
        [[[GO], calls(("f:0", {"n": 1}), ("f:1", {"n": 2}))],
         [[GO, calls(("f:1", {"n": 2})), told("f:1", "2")], DONE]],
        [[None, "2"]],
    ),
    "results of some calls only": (
        [[[GO], calls(("a", 1), ("b", 2), ("c", 3))],
         [[GO, calls(("a", 1), ("b", 2), ("c", 3)), told("c", "C")], DONE]],
        [[None, None, "C"]],
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
    "results whose ids the client left out": (
        [[[GO], calls(("a", {"n": 1}), ("b", {"n": 2}))],
         [[GO, calls(("a", {"n": 1}), ("b", {"n": 2})), told(None, "1"), told(None, "2")], DONE]],
        [["1", "2"]],
    ),
    "ids that the client wrote anew": (
        [[[GO], calls(("call_a", {"n": 1}), ("call_b", {"n": 2}))],
         [[GO, calls(("x1", {"n": 1}), ("x2", {"n": 2})), told("x2", "2"), told("x1", "1")], DONE]],
        [["1", "2"]],
    ),
    "functions of before there were tools, one after the other": (
        [[[GO], called("f")], [[GO, called("f"), {"role": "function", "name": "f", "content": "1"}], called("f")],
         [[GO, called("f"), {"role": "function", "name": "f", "content": "1"}, called("f"),
           {"role": "function", "name": "f", "content": "2"}], DONE]],
        [["1"], ["2"]],
    ),
    "two agents with functions": (
        [[[user("A")], called("f"), "A"], [[user("B")], called("f"), "B"],
         [[user("A"), called("f"), {"role": "function", "name": "f", "content": "a"}], DONE, "A"],
         [[user("B"), called("f"), {"role": "function", "name": "f", "content": "b"}], DONE, "B"]],
        [["a"], ["b"]],
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
    "empty ids": (
        [[[GO], calls(("", 1), ("", 2))], [[GO, calls(("", 1), ("", 2)), told("", "1"), told("", "2")], DONE]],
        [["1", "2"]],
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
    "a branch from the same question": (
        [[[GO], calls((X, {"n": 1}))], [[GO], calls((X, {"n": 2}))],
         [[GO, calls((X, {"n": 1})), told(X, "1")], DONE], [[GO, calls((X, {"n": 2})), told(X, "2")], DONE]],
        [["1"], ["2"]],
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
}  # fmt: skip


async def play(proxies: Sequence[Proxy], turns: list[list[Any]]) -> list[list[Any]]:
    rollout = f"r-{uuid.uuid4().hex}"
    for i, (messages, answer, *agent) in enumerate(turns):
        named = {"X_Rollout_Id": rollout} | ({"X_Agent_Name": agent[0]} if agent else {})
        await proxies[i % len(proxies)].ask(CHAT, {"messages": messages}, answer, **named)
    return await proxies[0].results(rollout)


@pytest.mark.parametrize("case", cases_with("turns", "results"), ids=lambda case: case["name"])
async def test_a_result_belongs_to_the_conversation_that_sends_it(case: Case, proxy: Proxy) -> None:
    assert await play([proxy], case["turns"]) == case["results"]


@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_result_is_given_to_the_call_that_stands_before_it(
    case: str, workers: int, proxies: Sequence[Proxy]
) -> None:
    turns, results = OWN[case]
    assert await play(proxies[:workers], turns) == results


def use(call_id: str, **given: Any) -> Json:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": given}


def used(call_id: str, text: str) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


async def test_blocks_of_messages_are_matched_within_their_conversation(proxy: Proxy) -> None:
    named, both = {"X_Rollout_Id": "messages"}, [use("t:0", n=1), use("t:0", n=2)]
    await proxy.ask(MESSAGES, {"system": "s", "messages": [GO]}, both, **named)
    await proxy.ask(MESSAGES, {"messages": [user("B")]}, [use("t:0", n=3)], **named)
    history = [GO, {"role": "assistant", "content": both}]
    back = [used("t:0", "1"), {"type": "text", "text": "Hurry."}, used("t:0", "2")]
    await proxy.ask(MESSAGES, {"system": "s2", "messages": [*history, {"role": "user", "content": back}]}, [], **named)
    assert await proxy.results("messages") == [["1", "2"], [None]]


def item(kind: str, call_id: str, item_id: str, given: str) -> Json:
    field = {"custom_tool_call": "input"}.get(kind, "arguments")
    return {"type": kind, "id": item_id, "call_id": call_id, "name": "f", field: given}


def output(kind: str, call_id: str, text: str) -> Json:
    return {"type": f"{kind}_output", "call_id": call_id, "output": text}


@pytest.mark.parametrize("kind", ["function_call", "custom_tool_call"])
@pytest.mark.parametrize("way", ["whole", "previous_response_id", "item_reference"])
async def test_items_of_responses_are_matched_within_their_conversation(kind: str, way: str, proxy: Proxy) -> None:
    rollout = f"{kind}-{way}"
    made, given = {}, {}
    for who in ("A", "B"):
        given[who] = [item(kind, "c:0", f"fc_{who}{i}", f'{{"n":{i}}}') for i in (1, 2)]
        _, made[who] = await proxy.asked(RESPONSES, {"input": who}, given[who], X_Rollout_Id=rollout)
    for who in ("A", "B"):
        results = [output(kind, "c:0", f"{who}{i}") for i in (1, 2)]
        sent: Json = {"input": [user(who), *given[who], *results]}
        if way == "previous_response_id":
            sent = {"input": results, "previous_response_id": made[who]["id"]}
        if way == "item_reference":
            sent = {"input": [{"type": "item_reference", "id": made["id"]} for made in given[who]] + results}
        await proxy.ask(RESPONSES, sent, [], X_Rollout_Id=rollout)
    assert await proxy.results(rollout) == [["A1", "A2"], ["B1", "B2"]]


async def test_a_client_that_sends_the_request_again_changes_nothing(proxy: Proxy) -> None:
    named = {"X_Rollout_Id": "again"}
    await proxy.ask(CHAT, {"messages": [GO]}, calls((X, {})), **named)
    await proxy.ask(CHAT, {"messages": [GO]}, calls((X, {})), **named, x_stainless_retry_count="1")
    follow = {"messages": [GO, calls((X, {})), told(X, "1")]}
    await proxy.ask(CHAT, follow, 503, **named)
    await proxy.ask(CHAT, follow, DONE, **named, x_stainless_retry_count="1")
    assert await proxy.results("again") == [[None], ["1"]]  # the agent was answered by the second


async def test_many_agents_that_count_alike_at_once(proxies: Sequence[Proxy]) -> None:
    """More than are kept in memory, by two proxies in turn, three turns each."""
    histories = {f"{i}": [user(f"task {i}")] for i in range(12)}
    for turn in range(3):
        for i, (who, history) in enumerate(histories.items()):
            answer = calls((N, {"turn": turn}))
            await proxies[i % 2].ask(CHAT, {"messages": history}, answer, X_Rollout_Id="many")
            history += [answer, told(N, f"{who} in {turn}")]
    for i, history in enumerate(histories.values()):
        await proxies[(i + 1) % 2].ask(CHAT, {"messages": history}, DONE, X_Rollout_Id="many")
    assert await proxies[0].results("many") == [[f"{i} in {turn}"] for turn in range(3) for i in range(12)]
