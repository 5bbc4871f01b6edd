"""The judge of calls among the rewarders: what it is asked, how often, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_proxy.features.judge.config import BudgetConfig, CallsConfig, RewarderConfig
from lightning_proxy.features.judge.judge import Judge, usd_of
from lightning_proxy.features.judge.rewarder import Away
from lightning_proxy.features.judge.table import KeptAnswers
from support.rewarded_by import completed, group, rewards

Running = Callable[..., AbstractAsyncContextManager[Any]]
Logged = pytest.LogCaptureFixture


async def test_the_judge_of_calls_may_score_them_when_the_rollout_ends(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(self: Judge, question: str) -> str:
        return "8, since it helps"

    monkeypatch.setattr(Judge, "_ask", ask)
    trainer = {"judge": {"model": "scripted"}}
    async with running(tmp_path, rewards={"use": [{"kind": "judge"}]}, trainer=trainer) as system:
        ids = await group(system, "a")
        (given,) = await rewards(system, ids)
        (call,) = (await system.call("GET", f"/rollouts/{ids[0]}"))[1]["calls"]
        assert (given["name"], given["reward"], given["call_id"]) == ("judge", 0.8, call["call_id"])
        assert (given["source"], given["comment"]) == ("scripted", "8, since it helps")


async def test_the_judge_of_calls_is_asked_once_for_each_and_stops_at_the_budget(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    asked: list[str] = []

    async def ask(self: Judge, question: str) -> str:
        asked.append(question.rpartition("\n")[2])
        if asked.count("The number for step 2:") in (1, 2):
            raise Away("judge.calls: busy")
        return "8"

    monkeypatch.setattr("lightning_proxy.features.judge.scoring.RETRY_S", 0.05)
    monkeypatch.setattr(Judge, "_ask", ask)
    settings = {"rewards": {"use": [{"kind": "judge"}], "budget": {"tokens": 300}}}
    async with running(tmp_path, trainer={"judge": {"model": "scripted"}}, **settings) as system:
        for _ in range(2):
            await system.chat("r")
        await system.call("POST", "/rollouts/r/end", {"status": "completed"})
        await rewards(system, ["r"])
        assert asked.count("The number for step 1:") == 1 and asked.count("The number for step 2:") == 3
        await completed(system, "later", "a")
        async with asyncio.timeout(10):
            while "judge.budget.tokens is spent" not in caplog.text:
                await asyncio.sleep(0.05)
        assert len(asked) == 4


async def test_questions_to_the_judge_of_calls_that_are_under_way_count_for_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(self: Judge, question: str) -> str:
        await asyncio.sleep(0)
        return "8"

    monkeypatch.setattr(Judge, "_ask", ask)
    answers = KeptAnswers("judge", RewarderConfig(kind="judge"), BudgetConfig(tokens=100))
    judge = Judge(CallsConfig(model="scripted", concurrency=2), str, answers)
    found = await asyncio.gather(*(judge.score("a" * 400, i) for i in (0, 1)), return_exceptions=True)
    assert [type(one).__name__ for one in found] == ["GivenScore", "Away"]
    assert answers.under_way == []


async def test_a_judge_of_calls_whose_price_nobody_knows_has_that_of_the_configuration(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(self: Judge, question: str) -> str:
        return "8"

    def unknown(answer: object) -> float:
        raise KeyError("own")

    monkeypatch.setattr(Judge, "_ask", ask)
    paid = {"use": [{"kind": "judge", "price": [1000, 1000]}], "budget": {"usd": 1}}
    trainer = {"judge": {"model": "hosted_vllm/own"}}
    async with running(tmp_path, rewards=paid, trainer=trainer) as system, system.store() as store:
        await rewards(system, await group(system, "a"))
        (spent,) = await store.database.all("SELECT tokens, usd FROM rewarder_spent")
    assert (spent["tokens"] > 0, spent["usd"]) == (True, pytest.approx(spent["tokens"] / 1000))
    assert usd_of(SimpleNamespace(completion_cost=unknown), None) is None
    answers = KeptAnswers("judge", RewarderConfig(kind="judge", price=[1000, 1000]), BudgetConfig())
    await answers.spend((1, 1), usd_of(SimpleNamespace(completion_cost=lambda _: 5.0), None))
    assert answers.usd == 0.002
