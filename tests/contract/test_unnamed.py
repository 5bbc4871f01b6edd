"""Conversations without a name, and all that clients and models do to them: each is one rollout, and no other's."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import CHAT, RESPONSES, Json, Scripted, Wire, calls, said, scripted, together, user

Turn = tuple[str, Json, Any]


@pytest.fixture
def key() -> str:
    """An agent's key of this test alone; conversations are looked for within one key."""
    return uuid.uuid4().hex


def chat(*messages: Json, answer: Any) -> Turn:
    return CHAT, {"messages": list(messages)}, answer


Q, ON = user("What time is it, 0a1b2c3d?"), user("go on")
DONE = said("done")
FIRST, FOLLOW = chat(Q, answer=said("hello")), chat(Q, said("hello"), ON, answer=DONE)


def test_nothing_is_shared_between_keys(model: Scripted, key: str) -> None:
    (first,), (other,) = model.rollouts([FIRST], key), model.rollouts([FOLLOW], f"{key}-other")
    assert first != other and model.rollouts([FOLLOW], key) == [first]


def test_tasks_and_evaluations_that_say_the_same_do_not_mix(model: Scripted, key: str) -> None:
    names, others = (
        {"Authorization": f"Bearer {key}", "X_Task_Id": "t"},
        [{"X_Task_Id": "u"}, {"X_Rollout_Mode": "eval"}],
    )
    first, follow = (
        [model.ask(*turn, **names | more).headers["x-rollout-id"] for more in ({}, *others)] for turn in (FIRST, FOLLOW)
    )
    assert first == follow and len({*first}) == 3


def test_a_response_is_known_by_its_id_and_by_its_conversation(model: Scripted, key: str) -> None:
    named = {"Authorization": f"Bearer {key}"}
    noon = {"type": "message", "id": "m_1", "role": "assistant", "content": [{"type": "output_text", "text": "noon"}]}
    first = model.ask(RESPONSES, {"input": [Q]}, [noon], **named)
    body = {"id": "resp_x", "status": "completed", "conversation": {"id": "conv_1"}, "output": []}
    for more in (
        {"previous_response_id": first.json["id"]},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
    ):
        answer = Wire([json.dumps(body).encode()], "application/json")
        found = model.ask(RESPONSES, {"input": "more"} | more, answer, **named)
        assert found.headers["x-rollout-id"] == first.headers["x-rollout-id"], more


def test_a_retry_of_a_first_request_goes_where_it_failed(model: Scripted, key: str) -> None:
    """Several agents ask the same at the same moment; two of them are refused, and their clients ask again."""

    def ask(answer: Any, **more: str) -> str:
        return model.ask(*chat(Q, answer=answer), Authorization=f"Bearer {key}", **more).headers["x-rollout-id"]

    first, second = together(4), together(2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, [first(answer) for answer in (DONE, 503, 503, DONE)]))
        again = list(pool.map(lambda _: ask(second(DONE), x_stainless_retry_count="1"), range(2)))
    assert len({*found}) == 4 and {*again} == {*found[1:3]}


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, key: str) -> None:
    found = []
    for turn in (FIRST, FOLLOW):
        with scripted(tmp_path) as one:
            found += one.rollouts([turn], key)
    assert len({*found}) == 1


def test_two_proxies_never_go_on_with_the_same_one(models: list[Scripted], key: str) -> None:
    first = [*models[0].rollouts([FIRST] * 16, key)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda i: models[i % 2].rollouts([FOLLOW], key)[0], range(16))
    assert sorted(found) == sorted(first)


TOOLS: Json = {
    "tools": [{"type": "function", "function": {"name": "User", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "User"}},
}


@pytest.mark.parametrize("tools", [{}, TOOLS], ids=["text", "tools"])
def test_conversations_of_short_json_stay_whole(tools: Json, model: Scripted) -> None:
    """Answers as clients keep them that validate them: written again, in another order, an age that is a fraction."""
    for names, edits in (("ABCD", False), ("ABCD", True), ("AAAA", False)):
        histories = [[{"role": "system", "content": "Extract the user."}, user(f"{name} is new")] for name in names]
        found, key = Counter[str](), uuid.uuid4().hex
        for turn in range(3):
            for name, history in zip(names, histories, strict=True):
                if edits and turn:
                    history[0] = {"role": "system", "content": f"Extract the user. Turn {turn}."}
                written = json.dumps({"name": name, "age": turn})
                answer = (
                    calls((f"c{turn}", {"name": name, "age": turn}), name="User")
                    if tools
                    else said(f"```json\n{written}\n```")
                )
                found.update(model.rollouts([(CHAT, {"messages": history, **tools}, answer)], key))
                kept = said(json.dumps({"age": float(turn), "name": name}, separators=(",", ":")))
                history += [kept, user(f"{name} is older now")]
        assert sorted(found.values()) == [3] * 4, (names, edits)
