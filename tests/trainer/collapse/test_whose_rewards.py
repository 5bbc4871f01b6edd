"""Whose rewards stop training: an own-scoped key's never, a plain key's until an evaluator has rewarded."""

import time
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.trainer.collapse import Monitor
from support.sections import TrainerConfig

GOOD, BAD = [1.0] * 30, [0.0] * 14


class Tenants:
    """A proxy whose version 1 is live for the trainer."""

    def __init__(self, system: Any, store: Any) -> None:
        self.system, self.store = system, store

    async def publish(self, directory: Path) -> None:
        step = await self.store.steps.claim([], 0)
        await self.store.steps.trained(step, None, {"skipped": 0.0})
        version = await self.store.versions.new("merged", step, {})
        await self.store.versions.saved(version, str(directory), "base")
        await self.store.versions.set_live(version, step, verified=True)

    async def rewarded(self, key: dict[str, str], version: int, rewards: list[float], n: int = 0) -> list[str]:
        """Rollouts that a key opened and rewards."""
        status, opened = await self.system.call("POST", "/rollouts", {"task_id": "t", "n": n or len(rewards)}, **key)
        assert status == 200
        rows = [{"version": version, "rollout_id": one["rollout_id"]} for one in opened]
        begun = "UPDATE rollouts SET policy_version = :version WHERE rollout_id = :rollout_id"
        await self.store.database.commit([(begun, rows)])
        ids = [one["rollout_id"] for one in opened]
        if rewards:
            await self.reward(key, ids, rewards)
        return ids

    async def reward(self, key: dict[str, str], ids: list[str], rewards: list[float]) -> None:
        bodies = [{"rollout_id": one, "reward": value} for one, value in zip(ids, rewards, strict=True)]
        assert (await self.system.call("POST", "/reward", bodies, **key))[0] == 200

    async def collapsed(self, **trainer: Any) -> bool:
        """Whether a trainer that starts now stops for the rewards that there are."""
        monitor = Monitor(TrainerConfig.model_validate(trainer), self.store, lambda: time.time() + 60)
        return await monitor.look() is not None

    async def told(self, key: dict[str, str] | None = None) -> Any:
        return (await self.system.call("GET", "/status", **(key or {})))[1]["uncounted"]


@pytest.fixture
async def tenants(running: Any, tmp_path: Path) -> Any:
    async with running(tmp_path) as system, system.store() as store:
        yield Tenants(system, store)


async def test_an_own_key_stops_nobody_and_status_says_what_does_not_count(tenants: Tenants, tmp_path: Path) -> None:
    own, plain = await tenants.system.key("own", scope="own"), await tenants.system.key("plain")
    assert await tenants.told(plain) is None, "there are no rewards"
    await tenants.rewarded(own, 0, GOOD)
    await tenants.publish(tmp_path)
    await tenants.rewarded(own, 1, BAD)
    assert not await tenants.collapsed()
    told = await tenants.told(plain)
    assert (told["rewards"], await tenants.told(own)) == (44, None)
    assert "`keys create NAME --evaluator`" in told["story"]
    await tenants.rewarded(plain, 0, GOOD)
    assert await tenants.told(plain) is None
    await tenants.rewarded(plain, 1, BAD)
    assert await tenants.collapsed()


async def test_an_own_key_with_evaluator_counts(tenants: Tenants, tmp_path: Path) -> None:
    own = await tenants.system.key("own", scope="own", evaluator=True)
    await tenants.rewarded(own, 0, GOOD)
    await tenants.publish(tmp_path)
    await tenants.rewarded(own, 1, BAD)
    assert await tenants.collapsed()


async def test_plain_keys_count_until_an_evaluator_has_rewarded(tenants: Tenants, tmp_path: Path) -> None:
    plain, judge = await tenants.system.key("plain"), await tenants.system.key("judge", evaluator=True)
    judged = [await tenants.rewarded(plain, 0, GOOD)]
    await tenants.publish(tmp_path)
    judged += [await tenants.rewarded(plain, 1, BAD)]
    await tenants.rewarded(judge, 0, [1.0])
    assert not await tenants.collapsed()
    await tenants.rewarded(judge, 0, GOOD)
    mine = await tenants.rewarded(judge, 1, [1.0] * 14)
    await tenants.reward(plain, mine, BAD)
    assert not await tenants.collapsed(), "a plain key's newer rewards change nothing"
    assert [(await tenants.store.rollouts.get(one)).reward for one in mine] == BAD, "but they are trained on"
    for ids, rewards in zip(judged, (GOOD, BAD), strict=True):
        await tenants.reward(judge, ids, rewards)
    await tenants.reward(judge, mine, BAD)
    assert await tenants.collapsed()


async def test_rollouts_that_an_own_key_fails_or_opens_hide_and_stop_nothing(tenants: Tenants, tmp_path: Path) -> None:
    own, judge = await tenants.system.key("own", scope="own"), await tenants.system.key("judge", evaluator=True)
    await tenants.rewarded(judge, 0, GOOD)
    await tenants.publish(tmp_path)
    await tenants.rewarded(judge, 1, [1.0] * 14)
    for name in await tenants.rewarded(own, 1, [], n=14):
        await tenants.system.call("POST", f"/rollouts/{name}/end", {"status": "failed"}, **own)
    assert not await tenants.collapsed(failed_rollouts="zero")
    await tenants.rewarded(judge, 1, [0.0] * 30)
    for _ in range(2):
        await tenants.rewarded(own, 1, [], n=1000)
    assert await tenants.collapsed()


async def test_keys_that_are_made_later_leave_what_was_rewarded_without_one(tenants: Tenants, tmp_path: Path) -> None:
    await tenants.rewarded({}, 0, GOOD)
    await tenants.publish(tmp_path)
    assert not await tenants.collapsed()
    plain, own = await tenants.system.key("plain"), await tenants.system.key("own", scope="own")
    await tenants.rewarded(own, 1, BAD)
    assert not await tenants.collapsed()
    await tenants.rewarded(plain, 1, BAD)
    assert await tenants.collapsed()
