"""Unnamed conversations whose answers are short and structured, as clients that validate them send them back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.apis.atoms import same_json

Running = Callable[..., AbstractAsyncContextManager[Any]]
Json = dict[str, Any]
SYSTEM = {"role": "system", "content": "Extract the user."}
TOOLS: Json = {
    "tools": [{"type": "function", "function": {"name": "User", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "User"}},
}


def structured(body: Json) -> Json:
    """A model that answers short JSON: as a call where a tool is forced, else as text."""
    turns = [message for message in body["messages"] if message["role"] == "user"]
    said = json.dumps({"name": turns[-1]["content"].split()[0], "age": len(turns)})
    if not body.get("tools"):
        return {"role": "assistant", "content": f"```json\n{said}\n```"}
    call = {"id": f"c{len(turns)}", "type": "function", "function": {"name": "User", "arguments": said}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def as_the_client_keeps_it(message: Json) -> Json:
    """The answer validated, and written again: other spaces, another order, an age that is a float."""
    text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    value = json.loads(text.strip("`").removeprefix("json"))
    said = json.dumps({"age": float(value["age"]), "name": value["name"]}, separators=(",", ":"))
    return {"role": "assistant", "content": said}


@pytest.mark.parametrize("tools", [{}, TOOLS], ids=["text", "tools"])
@pytest.mark.parametrize(
    ("names", "edits"),
    [(["Ann", "Bob", "Cid", "Dee"], False), (["Ann", "Bob", "Cid", "Dee"], True), (["Ann"] * 4, False)],
    ids=["different", "edited", "equal"],
)
async def test_conversations_of_short_json_stay_whole(
    running: Running, tmp_path: Path, tools: Json, names: list[str], edits: bool
) -> None:
    async with running(tmp_path) as system:
        system.vllm.answer = structured
        histories: list[list[Json]] = [[SYSTEM, {"role": "user", "content": f"{name} is new"}] for name in names]
        for turn in range(3):
            for name, history in zip(names, histories, strict=True):
                if edits and turn:
                    history[0] = {"role": "system", "content": f"Extract the user. Turn {turn}."}
                body = {"model": "policy", "messages": history, **tools}
                status, answer = await system.call("POST", "/v1/chat/completions", body)
                assert status == 200, answer
                history.append(as_the_client_keeps_it(answer["choices"][0]["message"]))
                history.append({"role": "user", "content": f"{name} is older now"})
        _, page = await system.call("GET", "/rollouts")
    assert Counter(rollout["calls"] for rollout in page["data"]) == {3: 4}


async def test_what_several_rollouts_may_have_said_leads_to_none(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.answer = lambda _: {"role": "assistant", "content": '{"ok": true}'}

        async def ask(*messages: tuple[str, str]) -> None:
            body = {"model": "policy", "messages": [{"role": role, "content": text} for role, text in messages]}
            assert (await system.call("POST", "/v1/chat/completions", body))[0] == 200

        await ask(("user", "Is the sky blue?"))
        await ask(("user", "Is grass green?"), ("assistant", '{"ok":true}'), ("user", "Is snow white?"))
        _, page = await system.call("GET", "/rollouts")
    assert [rollout["calls"] for rollout in page["data"]] == [1, 1]


def test_one_json_has_one_writing() -> None:
    same = ['{"a": 1, "b": [2.0]}', ' {"b":[2],"a":1}\n', '```json\n{"a":1.0,"b":[2]}\n```']
    assert len({same_json(text) for text in same}) == 1
    assert [same_json(text) for text in ("{}", "7", "plain", "{a: 1}", "[" * 5000, "")] == [None] * 6
    assert same_json('{"a": true}') != same_json('{"a": 1}')
