"""Several agents in a rollout: which are trained, what they are compared with, what is said of wrong names."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.collector import Collector
from lightning_proxy.trainer.types import Batch
from support.sections import PolicyConfig, TrainerConfig
from support.stores import store_url


class Traffic:
    """Records rollouts of several agents in a store, and collects what a step would take."""

    def __init__(self, database: Database) -> None:
        self.store = Store(database)

    async def rollout(
        self, name: str, final: float, calls: Sequence[tuple[str | None, tuple[int, ...]]],
        versions: Mapping[str | None, int] | None = None,
    ) -> None:  # fmt: skip
        """A rollout of (agent, prompt) calls, each answered by the tokens 8 9; `versions` by agent, 0 by default."""
        async with Recorder(self.store, merged=False) as recorder:
            for i, (agent, prompt) in enumerate(calls):
                rollout = RolloutName(name, "t", agent)
                request = {"messages": [{"role": "user", "content": f"{i}"}]}
                by = (versions or {}).get(agent, 0)
                start = CallStart(f"{name}-{i}", rollout, "chat/completions", "policy", by, request, time.time())
                await recorder.start(start)
                choice = Choice(0, (8, 9), (-1.0, -1.0), "stop")
                await recorder.end(CallEnd(f"{name}-{i}", name, "ok", {}, 200, prompt, (choice,)))
        await self.store.rewards.post([Reward(name, final)], None, b"")

    async def batch(self, live: int = 0, adapters: Any = None, **changed: Any) -> Batch | None:
        settings = {"group_size": 2, "tasks_per_step": 1, "baseline": "dr_grpo", **changed}
        policy = PolicyConfig(adapters=adapters or {})
        collector = Collector(TrainerConfig.model_validate(settings), self.store, policy=policy)
        return await collector.next_batch(live)


@pytest.fixture
async def traffic(tmp_path: Path) -> AsyncIterator[Traffic]:
    database = await open_database(StoreConfig(url=store_url(tmp_path)))
    yield Traffic(database)
    await database.close()


async def test_what_other_agents_said_is_context_of_a_trained_agents_row(traffic: Traffic) -> None:
    talk = [("planner", (0, 1)), ("executor", (0, 1, 8, 9, 2)), ("planner", (0, 1, 8, 9, 2, 8, 9, 3))]
    for name, final in (("a", 1.0), ("b", 0.0)):
        await traffic.rollout(name, final, talk)
    batch = await traffic.batch(agents=["planner"])
    assert batch is not None
    row = batch.samples[0]
    assert len(batch.samples) == 2 and row.call_ids == ("a-0", "a-2")
    assert row.token_ids == (0, 1, 8, 9, 2, 8, 9, 3, 8, 9)
    assert row.mask == (0, 0, 1, 1, 0, 0, 0, 0, 1, 1)
    assert row.advantages == (0, 0, 0.5, 0.5, 0, 0, 0, 0, 0.5, 0.5)
    assert batch.metrics["calls_of_others"] == 2


async def test_how_stale_a_rollout_is_its_trained_agents_calls_say(traffic: Traffic) -> None:
    for name, final in (("a", 1.0), ("b", 0.0)):  # the executor asks for the base model, by its own name
        await traffic.rollout(name, final, [("planner", (0, 1)), ("executor", (0, 2))], {"planner": 49})
    batch = await traffic.batch(50, agents=["planner"])
    assert batch is not None
    assert (batch.metrics["staleness_mean"], batch.metrics["staleness_max"]) == (1, 1)


async def test_rollouts_without_a_trained_agent_are_dropped_and_a_wrong_name_is_told(
    traffic: Traffic, caplog: pytest.LogCaptureFixture
) -> None:
    for name, final in (("a", 1.0), ("b", 0.0)):
        await traffic.rollout(name, final, [("planner", (0, 1)), (None, (0, 2))])
    with caplog.at_level(logging.WARNING):
        assert await traffic.batch(agents=["planer"]) is None
    assert (await traffic.store.rollouts.get("a")).dropped == "trainer.agents names none of its agents"
    assert "trainer.agents: no call of planer so far" in caplog.text
    assert "agents seen: no name (calls without X-Agent-Name), planner" in caplog.text


async def test_a_group_in_which_no_agent_has_a_sibling_is_dropped_for_that(traffic: Traffic) -> None:
    await traffic.rollout("a", 1.0, [("planner", (0, 1))])
    await traffic.rollout("b", 0.0, [("writer", (0, 1))])
    assert await traffic.batch(agents=["planner", "writer"]) is None
    assert (await traffic.store.rollouts.get("a")).dropped == "no siblings with calls of the same agent"


async def test_with_adapters_an_agent_that_asks_for_the_base_model_leaves_the_policy_to_the_others(
    running: Any, tmp_path: Path
) -> None:
    async with running(tmp_path, publish="lora") as system, system.store() as store:

        async def ask(agent: str, model: str) -> str:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
            _, answer = await system.call("POST", "/rollouts/r/v1/chat/completions", body, X_Agent_Name=agent)
            return str(answer["choices"][0]["message"]["content"])

        version = await system.earlier_version(store, tmp_path)
        await system.call("POST", "/policy/promote", {"version": version})
        assert await ask("executor", "base") == f"by base with {tmp_path.name}"
        assert (await ask("planner", "policy")).startswith("by policy-v1 ")
        assert (await ask("executor", "policy")).startswith("by policy-v1 ")
        _, rollout = await system.call("GET", "/rollouts/r")
        assert [call["policy_version"] for call in rollout["calls"]] == [0, 1, 1]


async def test_rows_of_a_rollout_are_parted_by_adapter_and_others_answers_are_context(traffic: Traffic) -> None:
    """Each asks with all that was said before: one row where they share an adapter, two where they do not."""
    talk = [("writer", (0, 1)), ("checker", (0, 1, 8, 9, 2)), ("rewriter", (0, 1, 8, 9, 2, 8, 9, 3))]
    for name, last, final in (("a", 3, 1.0), ("b", 3, 0.0), ("c", 1, 0.0)):
        await traffic.rollout(name, final, talk[:last])
    found = await traffic.batch(adapters={"writer": ["writer", "rewriter"], "checker": ["checker"]}, group_size=3)
    assert found is not None
    assert {(s.adapter, s.call_ids) for s in found.samples} == {
        ("writer", ("a-0", "a-2")), ("checker", ("a-1",)), ("writer", ("b-0", "b-2")), ("checker", ("b-1",)),
        ("writer", ("c-0",)),
    }  # fmt: skip
    (whole,) = (s for s in found.samples if s.call_ids == ("a-0", "a-2"))
    assert whole.token_ids == (0, 1, 8, 9, 2, 8, 9, 3, 8, 9)
    assert whole.mask == (0, 0, 1, 1, 0, 0, 0, 0, 1, 1)
    assert (found.compared, found.compared_by_adapter) == (3, {"writer": 3, "checker": 2})
