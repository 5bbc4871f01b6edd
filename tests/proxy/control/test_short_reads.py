"""A short rollout says exactly what a whole one says, and is as large as its content."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.control.transitions import transitions
from lightning_proxy.proxy.control.views import record_view, rollout_detail
from lightning_proxy.proxy.json_text import dumps, loads
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.requests.full import full_calls, full_transitions
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, RolloutName
from support.paths import ROOT
from support.stores import store_url

Running = Callable[..., AbstractAsyncContextManager[Any]]
Json = dict[str, Any]

LONG = "a long text that is said again in every turn; " * 4
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"properties": {LONG + str(i): i for i in range(9)}}},
}
TURNS = 14


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield Store(database)


def bodies(endpoint: str, said: list[str], source: random.Random) -> Json:
    """A request of this API that sends the whole conversation."""
    system = source.choice([LONG, LONG + "!", "short"])
    messages = [{"role": "user", "content": text, "id": 1.0} for text in said]
    tools = [
        {"type": "function", "name": f"tool_{i}", "parameters": {"n": True}} for i in range(source.choice([0, 2, 3]))
    ]
    match endpoint:
        case "completions":
            prompt: Any = "".join(said) if source.random() < 0.7 else [7, *range(len(said))]
            return {"model": "policy", "prompt": prompt, "logit_bias": {str(i): 1 for i in range(400)}}
        case "responses":
            own = messages if source.random() < 0.8 else said[-1]
            return {"model": "policy", "input": own, "instructions": system, "tools": tools, "call_id": ["x", "y"]}
        case "messages":
            blocks = [{"type": "text", "text": system}, {"type": "text", "text": "more"}]
            return {"model": "policy", "messages": messages, "system": source.choice([system, blocks]), "tools": tools}
    chat = [{"role": "system", "content": system}, *messages]
    return {"model": "policy", "messages": chat, "tools": tools, "stop": ["\n"], "response_format": SCHEMA, "seed": 0}


async def record(store: Store, rollout_id: str, endpoint: str, source: random.Random) -> None:
    """A rollout with an edited history, forks, failures, and calls that were sent again."""
    said, ids = ["🙂 \ud800 begin " + LONG], [1, 2, 3]
    async with Recorder(store, merged=False) as recorder:
        for turn in range(TURNS):
            match source.random():
                case x if x < 0.15:
                    del said[source.randrange(len(said)) :], ids[source.randrange(len(ids)) :]
                case x if x < 0.3:
                    said[source.randrange(len(said))] = f"edited {turn}"
                    ids[source.randrange(len(ids))] = 900 + turn
            said, ids = said or ["again"], ids or [4]
            call_id, request = f"{rollout_id}-{turn}", bodies(endpoint, said, source)
            name = RolloutName(rollout_id, "t", "planner", "train")
            for again in range(source.choice([1, 1, 1, 2])):
                one = f"{call_id}-{again}"
                await recorder.start(CallStart(one, name, endpoint, "m", 0, request, 1.0 + turn, is_retry=again > 0))
                answer = (100 + turn, again)
                if source.random() < 0.25:
                    await recorder.end(CallEnd(one, rollout_id, "error", {"error": "no"}, 500, tuple(ids)))
                    continue
                choice = Choice(0, answer, (-0.5, -0.5), "stop")
                await recorder.end(CallEnd(one, rollout_id, "ok", {"id": one}, 200, tuple(ids), (choice,)))
            said, ids = [*said, f"answer {turn} {LONG}"], [*ids, *answer, 50 + turn]


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "responses", "messages"])
async def test_a_short_rollout_made_whole_is_the_whole_one(store: Store, endpoint: str) -> None:
    shortened = 0
    for seed in range(12):
        rollout_id = f"r{seed}"
        await record(store, rollout_id, endpoint, random.Random(seed))
        rollout = await store.rollouts.get(rollout_id)
        short, whole = [await store.calls.of(rollout_id, short=is_short) for is_short in (True, False)]
        told = [loads(dumps(rollout_detail(rollout, calls, [])["calls"])) for calls in (short, whole)]
        assert dumps(full_calls(told[0])) == dumps(
            [sorted_as(one, other) for one, other in zip(told[1], full_calls(told[0]), strict=True)]
        )
        assert whole_requests(told[0]) == {call["call_id"]: call["request"] for call in told[1]}
        steps = [loads(dumps([*map(record_view, transitions(rollout, calls))])) for calls in (short, whole)]
        assert full_transitions(steps[0]) == steps[1]
        assert full_transitions(steps[1]) == steps[1]
        shortened += sum(call["request_of"] is not None for call in told[0])
    assert shortened > 4 * TURNS


def whole_requests(calls: list[Json]) -> dict[str, Json]:
    """What docs/client.md does to make requests whole."""
    (code,) = re.findall(r"```python\n(def whole_requests.*?)```", (ROOT / "docs/client.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["whole_requests"](calls)


def sorted_as(call: Json, other: Json) -> Json:
    """The call with the fields of its request in the other's order, which is not kept."""
    assert call["request"].keys() == other["request"].keys()
    return call | {"request": {name: call["request"][name] for name in other["request"]}}


async def test_a_rollout_twice_as_long_is_twice_as_large_unless_it_is_asked_for_whole(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system:
        sizes: dict[str, list[int]] = {}
        for turns in (20, 40):
            for name in ("messages", "prompts"):
                async with system.store() as store, Recorder(store, merged=False) as recorder:
                    await talk(
                        recorder, f"{name}-{turns}", "completions" if name == "prompts" else "chat/completions", turns
                    )
                for route in ("", "/transitions"):
                    path = f"/rollouts/{name}-{turns}{route}"
                    for form in ("short", "whole"):
                        _, told = await system.call("GET", f"{path}?requests={form}")
                        sizes.setdefault(f"{name} {route} {form}", []).append(len(dumps(told)))
                    assert (await system.call("GET", path))[1] == (await system.call("GET", f"{path}?requests=short"))[
                        1
                    ]
        growth = {name: larger / smaller for name, (smaller, larger) in sizes.items()}
        assert {name for name, times in growth.items() if times > 2.2} == {name for name in growth if "whole" in name}
        assert (await system.call("GET", "/rollouts/messages-20?requests=all"))[0] == 422


async def test_a_short_call_says_what_it_adds_and_to_which_call(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        async with system.store() as store, Recorder(store, merged=False) as recorder:
            await talk(recorder, "r", "chat/completions", 3)
        calls = (await system.call("GET", "/rollouts/r"))[1]["calls"]
        assert [call["request_of"] for call in calls] == [
            None,
            {"call_id": "r-0", "messages": 1, "tools": 1},
            {"call_id": "r-1", "messages": 3, "tools": 1},
        ]
        assert [len(call["request"]["messages"]) for call in calls] == [1, 2, 2]
        assert [call["request"]["tools"] for call in calls] == [[{"type": "function"}], [], []]
        assert [call["request"]["model"] for call in calls] == ["policy"] * 3
        assert [call["prompt_of"] for call in calls] == [
            None,
            {"call_id": "r-0", "tokens": 102},
            {"call_id": "r-1", "tokens": 204},
        ]
        steps = (await system.call("GET", "/rollouts/r/transitions"))[1]["data"]
        assert steps[0]["next_state"] == steps[1]["state"]
        assert steps[1]["state"]["request_of"] == calls[1]["request_of"]


async def talk(recorder: Recorder, rollout_id: str, endpoint: str, turns: int) -> None:
    messages: list[Json] = [{"role": "user", "content": LONG}]
    prompt: tuple[int, ...] = tuple(range(100))
    for turn in range(turns):
        call_id, name = f"{rollout_id}-{turn}", RolloutName(rollout_id, "t")
        own = (
            {"prompt": dumps(messages)[:-1]}
            if endpoint == "completions"
            else {"messages": messages, "tools": [{"type": "function"}]}
        )
        await recorder.start(CallStart(call_id, name, endpoint, "m", 0, {"model": "policy", **own}, 1.0 + turn))
        choice = Choice(0, (100 + turn, 0), (-0.5, -0.5), "stop")
        await recorder.end(CallEnd(call_id, rollout_id, "ok", {"id": call_id}, 200, prompt, (choice,)))
        messages = [*messages, {"role": "assistant", "content": f"{turn} {LONG}"}, {"role": "user", "content": LONG}]
        prompt = (*prompt, *choice.token_ids, *range(100))
