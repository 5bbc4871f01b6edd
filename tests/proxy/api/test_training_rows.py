"""`GET /rollouts/{id}/rows`: how a rollout was trained, call by call, beside the siblings it was compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.collector import Collector
from support.sections import PolicyConfig, TrainerConfig

Running = Callable[..., AbstractAsyncContextManager[Any]]
Tokens = Sequence[int]
# Prompt and answer of each call: the second goes on with the first, the third with an earlier answer spelt otherwise.
TALK = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 9, 5], [7, 8])]
AGENTS = ("planner", "planner", "executor")


async def record(
    store: Store,
    name: str,
    talk: Sequence[tuple[Tokens, Tokens]],
    reward: float,
    agents: Sequence[str | None] = AGENTS,
    key_id: str | None = None,
) -> None:
    """A rewarded rollout of task `t`; call i is named NAME-i, and one without an answer cannot be trained on."""
    async with Recorder(store, merged=False) as recorder:
        for i, (prompt, answer) in enumerate(talk):
            call_id, of = f"{name}-{i}", RolloutName(name, "t", agents[i], key_id=key_id)
            await recorder.start(CallStart(call_id, of, "chat/completions", "policy", 0, {"n": i}, time.time()))
            choice = Choice(0, tuple(answer), (-1.0,) * len(answer), "stop")
            why = None if answer else "no token ids from the upstream"
            end = CallEnd(call_id, name, "ok", {}, 200, tuple(prompt), (choice,), untrainable_reason=why)
            await recorder.end(end)
    await store.rewards.post([Reward(name, reward)], None, b"")


async def claim(store: Store, policy: PolicyConfig | None = None, **changed: Any) -> int:
    settings = {"group_size": 2, "tasks_per_step": 1, "baseline": "dr_grpo", **changed}
    batch = await Collector(TrainerConfig.model_validate(settings), store, policy=policy).next_batch(0, fewer=True)
    assert batch is not None
    return batch.step


async def shown(system: Any, name: str, **headers: str) -> Any:
    status, answer = await system.call("GET", f"/rollouts/{name}/rows", **headers)
    assert status == 200, answer
    return answer


async def test_rows_of_agents_with_adapters_of_their_own_are_counted_over_the_rollout(
    running: Running, tmp_path: Path
) -> None:
    adapters = {"first": ["executor"], "second": ["planner"]}
    async with running(tmp_path, publish="lora", adapters=adapters) as system, system.store() as store:
        policy = system.config.policy
        for name, reward in (("good", 1.0), ("bad", 0.0)):
            await record(store, name, TALK, reward)
        await claim(store, policy)
        answer = await shown(system, "good")
        assert [(c["row"], c["placed"]) for c in answer["calls"]] == [(0, "first"), (0, "merged"), (1, "first")]
        assert [(row["row"], row["call_ids"], row["tokens"], row["trained_tokens"]) for row in answer["rows"]] == [
            (0, ["good-0", "good-1"], 6, 3), (1, ["good-2"], 7, 2),
        ]  # fmt: skip


async def test_a_step_that_is_undone_takes_its_credit_with_it_and_a_new_one_takes_the_place_of_the_old(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for name, reward in (("good", 1.0), ("bad", 0.0)):
            await record(store, name, TALK, reward)
        first = await claim(store)
        assert await store.steps.release_unfinished() == [first]
        assert [c["placed"] for c in (await shown(system, "good"))["calls"]] == [None] * 3
        await store.steps.trained(await claim(store), None, {})
        await store.rewards.post(
            [Reward(name, 5.0 * i, retrain=True) for i, name in enumerate(("good", "bad"))], None, b""
        )
        second = await claim(store, agents=["planner"])
        found = [(c["step"], c["return"], c["placed"]) for c in (await shown(system, "good"))["calls"]]
        assert found == [(second, 0.0, "first"), (second, 0.0, "merged"), (None, None, None)]
        await store.steps.forget_all()
        assert [c["step"] for c in (await shown(system, "good"))["calls"]] == [None] * 3
