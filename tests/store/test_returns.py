"""The return that the store keeps of a rollout is that of the pure function, whatever was posted, in whatever order."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Reward, RolloutName, Sender
from lightning_proxy.core.returns import Rules, earned
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import open_database, opened
from lightning_proxy.store.store import Store
from support.stores import do_again, store_url

NAMES = ("reward", "style", "nothing", "other")
RULES = [
    Rules({"reward": 1.0}),
    Rules({"reward": 0.3, "style": -1.7, "nothing": 0.0}, failed=0.0),
    Rules({"style": 1e12, "reward": 1e-9}, failed=-1.0),
    Rules({"other": 0.1}),
]
VALUES = (0.1, 0.2, 0.3, -0.1, 1.0, 0.0, 1e-12, -9999.9, 1e300, 5e-324)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await open_database(StoreConfig(url=store_url(tmp_path)))
    do_again(database)
    yield database
    await database.close()


async def record(store: Store, rollouts: Sequence[str], calls: int) -> None:
    async with Recorder(store, merged=False) as recorder:
        for rollout in rollouts:
            for seq in range(calls):
                call_id = f"{rollout}-{seq}"
                await recorder.start(CallStart(call_id, RolloutName(rollout), "chat/completions", "p", 0, {}, 1.0))
                await recorder.end(CallEnd(call_id, rollout, "ok", {}, 200))


async def agrees(store: Store, rollouts: Sequence[str]) -> None:
    rules = await store.rewards.rules()
    for name in rollouts:
        kept, posted = await store.rollouts.get(name), await store.rewards.of(name)
        found = earned(posted, rules, kept.status)
        assert (kept.reward, kept.own_reward) == (found.returned, found.own), name
        assert {c.call_id: c.reward for c in await store.calls.of(name) if c.reward is not None} == found.calls
        counted = [r.created_at for r in posted if r.name in rules.weights]
        row = await store.database.one("SELECT rewarded_at FROM rollouts WHERE rollout_id = :r", {"r": name})
        assert row is not None and row["rewarded_at"] == min(counted, default=None)


@pytest.mark.parametrize("seed", range(len(RULES)))
async def test_it_is_the_pure_functions_after_any_history(database: Database, seed: int) -> None:
    store, chance, rollouts = Store(database), random.Random(seed), [f"r{i}" for i in range(5)]
    await record(store, rollouts, 3)
    await store.rewards.use(RULES[seed])
    for _ in range(40):
        match chance.random():
            case x if x < 0.05:
                await store.rewards.adopt(chance.choice(RULES))  # what was posted before is stale now
            case x if x < 0.1:
                name = chance.choice(rollouts)
                if (await store.rollouts.get(name)).status == "running":
                    await store.rollouts.end(name, chance.choice(["failed", "completed"]), None)  # type: ignore[arg-type]
            case _:
                some = [chance.choice(rollouts) for _ in range(chance.randint(1, 12))]
                await store.rewards.post([
                    Reward(name, chance.choice(VALUES), chance.choice([None, *(f"{name}-{i}" for i in range(3))]),
                           chance.choice(NAMES), final=False)
                    for name in some
                ])  # fmt: skip
        if chance.random() < 0.2:
            await store.rewards.recount()
            await agrees(store, rollouts)
    await store.rewards.recount()
    await agrees(store, rollouts)


async def test_a_change_of_rules_forgets_no_evaluator(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        store = Store(database)
        await store.rollouts.open([(RolloutName("r"), "hash")], {})
        for value, evidence in ((1.0, True), (2.0, False)):
            await store.rewards.post([Reward("r", value, final=False)], by=Sender("key", evidence=evidence))
        for i in range(10):
            await store.rewards.use(Rules({"reward": 1.0, f"style-{i}": 1.0}))
            assert await database.value(float, "SELECT trusted_reward FROM rollouts") == 1.0


def test_a_name_of_weight_0_is_a_reward_of_0_an_unknown_one_is_none_and_sums_are_exact() -> None:
    for posted, returned in (
        ([], None),
        ([Reward("r", 1.0, name="other")], None),
        ([Reward("r", 5.0, name="nothing")], 0.0),
        ([Reward("r", 0.1, name) for name in "abcdefghij"], 1.0),
    ):
        assert earned(posted, Rules({"reward": 1.0, "nothing": 0.0})).returned == returned, posted
