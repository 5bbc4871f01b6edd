"""`policy compare`: two versions by what was recorded of them, with the statistics of `eval`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.eval.stats import compare
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, Mode, Reward, RolloutName

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def answered(
    store: Store, version: int, task: str, reward: float, tokens: int, latency_ms: float, mode: Mode = "eval"
) -> None:
    """A rollout of one call."""
    name = RolloutName(f"{task}-v{version}-{tokens}-{mode}", task, mode=mode)
    await store.rollouts.open([(name, f"hash of {name.rollout_id}")], {}, policy_version=version)
    async with Recorder(store, merged=False) as recorder:
        call_id, choice = f"call of {name.rollout_id}", Choice(0, (1,) * tokens, (-1.0,) * tokens)
        await recorder.start(CallStart(call_id, name, "chat/completions", "policy", version, {}, 1.0))
        await recorder.end(CallEnd(call_id, name.rollout_id, "ok", {}, 200, (1,), (choice,), latency_ms=latency_ms))
    await store.rewards.post([Reward(name.rollout_id, reward)], None, b"")


async def test_two_versions_are_compared_by_reward_tokens_and_latency(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, publish="lora") as system, system.store() as store:
        assert await store.versions.new("lora", await store.steps.claim([], 0), {}) == 1
        for task, before, after in (("t1", 0.0, 1.0), ("t2", 0.5, 0.5), ("t3", 0.25, 1.0)):
            await answered(store, 0, task, before, 10, 2000.0)
            await answered(store, 1, task, after, 4, 500.0)
        await answered(store, 1, "t1", 0.0, 6, 700.0)  # a sibling: both are one pair
        await answered(store, 0, "t4", 1.0, 99, 9.0)
        out = (await system.lightning("policy", "compare", "0", "1")).stdout
        found = json.loads((await system.lightning("policy", "compare", "0", "1", "--json")).stdout)
    assert "eval rollouts of 3 common tasks: 3 of version 0 and 4 of version 1" in out
    rewards = compare([0.5, 0.5, 1.0], [0.0, 0.5, 0.25], 0)
    for metric, a, b, difference in (("mean", 0.25, 2 / 3, 5 / 12), ("tokens", 10, 13 / 3, -17 / 3)):
        shown = found["metrics"][metric]
        assert [shown[one] for one in ("a", "b", "difference")] == pytest.approx([a, b, difference])
    assert found["metrics"]["mean"]["p"] == rewards.p
    assert found["interval"] == [rewards.interval.low, rewards.interval.high], "the route has the same"
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert lines["reward"][1:4] == ["0.25", "0.667", "0.417"]
    assert lines["latency, ms"][2:5] == ["2,000", "533", "-1,467"]


async def test_what_cannot_be_compared_is_one_clear_error(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, publish="lora") as system, system.store() as store:
        await store.versions.new("lora", await store.steps.claim([], 0), {})
        await answered(store, 0, "t1", 1.0, 4, 10.0, "train")
        for arguments, message in (
            (("0", "1"), "policy version 1 has no rewarded train rollouts of a task"),
            (("0", "1", "--mode", "eval"), "policy version 0 has no rewarded eval rollouts of a task"),
            (("0", "9"), "no policy version 9"),
            (("0", "1", "--mode", "both"), "--mode is train or eval, got 'both'"),
        ):
            code, _, error = await system.lightning("policy", "compare", *arguments)
            assert code and message in error, error
        await answered(store, 1, "t2", 1.0, 4, 10.0, "train")
        _, _, error = await system.lightning("policy", "compare", "0", "1")
        assert "policy versions 0,1 have no task in common in mode train" in error
        assert "`lightning-proxy eval --tasks FILE --models 0,1 -- COMMAND` gives both the same tasks" in error
