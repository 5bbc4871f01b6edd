"""`GET /rollouts` with words, and by version, step, key and model; siblings that no step has compared yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.control.words import words_in, words_view
from lightning_proxy.proxy.store.reports.summaries import AT_ONCE, Summary, Words
from support.byte_tokens import record, train

Running = Callable[..., AbstractAsyncContextManager[Any]]
USER = {"role": "user", "content": "a  b"}
ASKED = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "x"}, USER]
PARTS = [{"role": "user", "content": [{"type": "input_text", "text": "a b"}]}]
CALL = {"function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("request_", "response", "question", "answer"),
    [
        ({"messages": ASKED}, {"choices": [{"message": {"role": "assistant", "content": "c"}}]}, "a b", "c"),
        ({"messages": ASKED}, {"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}, "a b", "add(…)"),
        ({"prompt": "a b"}, {"choices": [{"text": "c"}]}, "a b", "c"),
        ({"input": PARTS}, {"output": [{"content": [{"type": "output_text", "text": "c"}]}]}, "a b", "c"),
        ({"messages": PARTS, "system": "s"}, {"content": [{"type": "text", "text": "c"}]}, "a b", "c"),
        ({"messages": 5}, {"choices": [7]}, None, None),
        ([], None, None, None),
        ({"messages": [{"role": "user", "content": "x" * 999}]}, {}, "x" * 200, None),
    ],
)  # fmt: skip
def test_the_first_words_of_every_api_are_found(request_: Any, response: Any, question: Any, answer: Any) -> None:
    stored = json.dumps({"new": request_}), json.dumps(response)
    view = words_view(Summary(words_in(*stored), "m", "k", 5.0, "ok"))
    assert (view["question"], view["answer"]) == (question, answer)
    assert (view["model"], view["key"], view["latency_ms"]) == ("m", "k", 5.0)


async def listed(system: Any, query: str) -> list[Any]:
    status, page = await system.call("GET", f"/rollouts{query}")
    assert status == 200, page
    rollouts: list[Any] = page["data"]
    return rollouts


async def test_texts_are_read_again_only_after_a_further_call(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        read: list[str | None] = []

        def words(request: str | None, response: str | None) -> Words:
            read.append(request)
            return words_in(request, response)

        for name in [f"r{n}" for n in range(AT_ONCE + 1)]:
            await system.chat(name)
        names = [row["rollout_id"] for row in await listed(system, "")]
        assert {one.words.question for one in (await store.summaries.of(names, words)).values()} == {"hi"}
        await system.chat("r1")
        found = await store.summaries.of(names, words)
        assert (len(found), len(read)) == (AT_ONCE + 1, AT_ONCE + 2)


async def test_lists_have_words_and_are_filtered_by_version_step_and_model(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "good", ["a"], 1.0)
        await record(store, "bad", ["b"], 0.0)
        step = await train(store)
        await system.chat("r1")
        assert "question" not in (await listed(system, ""))[0]
        newest = (await listed(system, "?words=true"))[0]
        assert (newest["question"], newest["last_call"]) == ("hi", "ok")
        assert newest["answer"].startswith("by base with")
        assert newest["latency_ms"] > 0
        for query, names in (
            (f"step={step}", ["bad", "good"]), ("version=0", ["r1", "bad", "good"]), ("version=3", []),
            (f"model={newest['model']}&prefix=r", ["r1"]), ("model=none", []), ("key=nobody", []),
        ):  # fmt: skip
            assert [one["rollout_id"] for one in await listed(system, f"?{query}")] == names, query


async def siblings(system: Any, name: str) -> list[str]:
    _, rows = await system.call("GET", f"/rollouts/{name}/rows")
    return [one["rollout_id"] for one in rows["group"]]


async def test_rollouts_are_siblings_before_a_step_compares_them(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "one", ["a"], 1.0)
        await record(store, "two", ["b"], 0.0)
        assert await siblings(system, "one") == ["one", "two"]
        _, together = await system.call("POST", "/rollouts", {"task_id": "t", "n": 2})
        names = [one["rollout_id"] for one in together]
        assert await siblings(system, names[1]) == names
        await train(store)
        await record(store, "three", ["a"], 1.0)
        assert await siblings(system, "one") == ["one", "two"]
        assert await siblings(system, "three") == ["three"]
        await system.chat("held-out", X_Task_Id="t", X_Rollout_Mode="eval")
        assert await siblings(system, "held-out") == ["held-out"]
