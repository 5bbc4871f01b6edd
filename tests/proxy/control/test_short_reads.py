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
from lightning_proxy.proxy.store.requests.full import full_calls
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
        whole_states = [one["state"] for one in steps[1] if one["kind"] == "llm"]
        made_whole = full_calls(map(as_call, (one for one in steps[0] if one["kind"] == "llm")))
        assert [one["request"] | {"prompt_token_ids": one["prompt_token_ids"]} for one in made_whole] == whole_states
        shortened += sum(call["request_of"] is not None for call in told[0])
    assert shortened > 4 * TURNS


def as_call(step: Json) -> Json:
    """The short state and the action of a model's transition as those of a call."""
    state = {"request_of": None, "prompt_of": None} | step["state"]
    apart = {name: state.pop(name) for name in ("request_of", "prompt_of", "prompt_token_ids")}
    return apart | {"call_id": step["call_id"], "request": state, "response_token_ids": step["action"]["token_ids"]}


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
