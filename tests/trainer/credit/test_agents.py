"""Several agents in a rollout: which are trained, what they are compared with, what is said of wrong names."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import pytest

from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from support.rewarded import Traffic

PAIR = (("a", 1.0), ("b", 0.0))


async def talk(
    traffic: Traffic, name: str, final: float, calls: Sequence[tuple[str | None, tuple[int, ...]]],
    versions: Mapping[str | None, int] | None = None,
) -> None:  # fmt: skip
    """A rollout of (agent, prompt) calls, each answered by the tokens 8 9; `versions` by agent, 0 by default."""
    async with Recorder(traffic.store, merged=False) as recorder:
        for i, (agent, prompt) in enumerate(calls):
            request = {"messages": [{"role": "user", "content": f"{i}"}]}
            rollout, version = RolloutName(name, "t", agent), (versions or {}).get(agent, 0)
            start = CallStart(f"{name}-{i}", rollout, "chat/completions", "policy", version, request, time.time())
            await recorder.start(start)
            choice = Choice(0, (8, 9), (-1.0, -1.0), "stop")
            await recorder.end(CallEnd(f"{name}-{i}", name, "ok", {}, 200, prompt, (choice,)))
    await traffic.post(Reward(name, final))


async def test_what_other_agents_said_is_context_of_a_trained_agents_row(traffic: Traffic) -> None:
    calls = [("planner", (0, 1)), ("executor", (0, 1, 8, 9, 2)), ("planner", (0, 1, 8, 9, 2, 8, 9, 3))]
    for name, final in PAIR:
        await talk(traffic, name, final, calls)
    batch = await traffic.taken(agents=["planner"])
    row = batch.samples[0]
    assert len(batch.samples) == 2 and row.call_ids == ("a-0", "a-2")
    assert row.token_ids == (0, 1, 8, 9, 2, 8, 9, 3, 8, 9)
    assert row.mask == (0, 0, 1, 1, 0, 0, 0, 0, 1, 1)
    assert row.advantages == (0, 0, 0.5, 0.5, 0, 0, 0, 0, 0.5, 0.5)
    assert batch.metrics["calls_of_others"] == 2


async def test_how_stale_a_rollout_is_its_trained_agents_calls_say(traffic: Traffic) -> None:
    for name, final in PAIR:  # the executor asks for the base model, by its own name
        await talk(traffic, name, final, [("planner", (0, 1)), ("executor", (0, 2))], {"planner": 49})
    batch = await traffic.taken(50, agents=["planner"])
    assert (batch.metrics["staleness_mean"], batch.metrics["staleness_max"]) == (1, 1)


async def test_rollouts_without_a_trained_agent_are_dropped_and_a_wrong_name_is_told(
    traffic: Traffic, caplog: pytest.LogCaptureFixture
) -> None:
    for name, final in PAIR:
        await talk(traffic, name, final, [("planner", (0, 1)), (None, (0, 2))])
    with caplog.at_level(logging.WARNING):
        assert await traffic.batch(agents=["planer"]) is None
    assert await traffic.dropped("a") == ["trainer.agents names none of its agents"]
    assert "trainer.agents: no call of planer so far" in caplog.text
    assert "agents seen: no name (calls without X-Agent-Name), planner" in caplog.text


async def test_a_group_in_which_no_agent_has_a_sibling_is_dropped_for_that(traffic: Traffic) -> None:
    await talk(traffic, "a", 1.0, [("planner", (0, 1))])
    await talk(traffic, "b", 0.0, [("writer", (0, 1))])
    assert await traffic.batch(agents=["planner", "writer"]) is None
    assert await traffic.dropped("a") == ["no siblings with calls of the same agent"]


async def test_rows_of_a_rollout_are_parted_by_adapter_and_others_answers_are_context(traffic: Traffic) -> None:
    """Each asks with all that was said before: one row where they share an adapter, two where they do not."""
    calls = [("writer", (0, 1)), ("checker", (0, 1, 8, 9, 2)), ("rewriter", (0, 1, 8, 9, 2, 8, 9, 3))]
    for name, last, final in (("a", 3, 1.0), ("b", 3, 0.0), ("c", 1, 0.0)):
        await talk(traffic, name, final, calls[:last])
    found = await traffic.taken(adapters={"writer": ["writer", "rewriter"], "checker": ["checker"]}, group_size=3)
    assert {(s.adapter, s.call_ids) for s in found.samples} == {
        ("writer", ("a-0", "a-2")), ("checker", ("a-1",)), ("writer", ("b-0", "b-2")), ("checker", ("b-1",)),
        ("writer", ("c-0",)),
    }  # fmt: skip
    (whole,) = (s for s in found.samples if s.call_ids == ("a-0", "a-2"))
    assert whole.token_ids == (0, 1, 8, 9, 2, 8, 9, 3, 8, 9)
    assert whole.mask == (0, 0, 1, 1, 0, 0, 0, 0, 1, 1)
    assert (found.compared, found.compared_by_adapter) == (3, {"writer": 3, "checker": 2})
