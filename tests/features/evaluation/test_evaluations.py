"""Which version is the best, by which one number, and what a promotion of `best` makes live."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.features.evaluation.evaluations import Evaluations
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url

NUMBERS = count()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield Store(database)


async def saved(store: Store, publish: Any, step: int) -> int:
    version = await store.versions.new(publish, step, {})
    await store.versions.saved(version, f"/v{version}", None)
    return version


async def published(store: Store, count: int) -> None:
    for step in range(1, count + 1):
        await store.versions.set_live(await saved(store, "lora", step))


async def evaluated(store: Store, version: int, reward: float) -> None:
    evaluations = Evaluations(store)
    await evaluations.begin(version, version)
    await evaluations.ended(version, reward=reward, low=reward - 0.1, high=reward + 0.1)


async def rewarded(store: Store, version: int, *rewards: float, mode: Any = "train", n: int = 4) -> None:
    """`n` rollouts of each of some tasks, with the rewards of the tasks."""
    for task, reward in enumerate(rewards):
        names = [RolloutName(f"{mode}-{next(NUMBERS)}", f"t{task}", mode=mode) for _ in range(n)]
        await store.rollouts.open([(name, f"hash of {name.rollout_id}") for name in names], {}, policy_version=version)
        await store.rewards.post([Reward(name.rollout_id, reward) for name in names])


async def best_of(store: Store) -> Any:
    best = await Evaluations(store).best()
    return best and (best.version, best.judged)


async def test_the_best_by_rewards_is_the_newest_that_is_not_clearly_worse(store: Store) -> None:
    await published(store, 7)
    assert await best_of(store) is None
    for version in range(1, 7):
        await rewarded(store, version, *(version / 10 + task / 20 for task in range(4)))
    assert await best_of(store) == (6, "reward")
    await rewarded(store, 7, 0.9, n=2)
    assert await best_of(store) == (6, "reward"), "too few rollouts to tell"
    await rewarded(store, 7, *[0.0] * 8)
    assert await best_of(store) == (6, "reward"), "it collapsed"
    await store.versions.failed(6, "it does not verify")
    assert await best_of(store) == (5, "reward")


async def test_a_version_that_no_agent_got_for_certain_is_not_the_best(store: Store) -> None:
    await published(store, 1)
    for step in (2, 3):
        await saved(store, "merged", step)
    for version in range(4):
        await rewarded(store, version, *[version / 10] * 3)
    await Promotions(store.database).begin(2, 2, 1)  # a gate has not let it through
    assert await best_of(store) == (1, "reward")
    await store.versions.set_live(3)
    assert await best_of(store) == (3, "reward")
    await store.versions.set_live(1)  # by hand, before its weights were seen to be served
    assert await best_of(store) == (1, "reward")


async def test_held_out_rewards_count_first_whoever_made_them(store: Store) -> None:
    await published(store, 5)
    for version in range(6):
        await rewarded(store, version, *[version / 5] * 4)
    await evaluated(store, 1, 0.4)
    await evaluated(store, 3, 0.3)
    best: Any = await Evaluations(store).best()
    assert (best.judged, best.story) == ("evaluation", "version 1: held-out reward 0.400 (0.300 to 0.500)")
    await rewarded(store, 2, 0.4, 0.6, mode="eval")  # as `lightning-proxy eval` records them
    assert await best_of(store) == (2, "evaluation")
    await store.rollouts.open([(RolloutName("begun", "t0", mode="eval"), "hash")], {}, policy_version=2)
    assert await Evaluations(store).under_way() == {2}, "it is evaluated again"
    assert await best_of(store) == (1, "evaluation")
    await store.rollouts.end("begun", "failed", None)
    best = await Evaluations(store).best()
    assert (best.version, best.reward) == (2, (4 * 0.4 / 5 + 0.6) / 2), "a failed program earns 0"
    await store.versions.forget_files(2)
    assert await best_of(store) == (1, "evaluation")


@pytest.fixture
async def served(start: Any, tmp_path: Path) -> AsyncIterator[Any]:
    """A proxy whose versions 0 to 2 can be promoted."""
    async with start(publish="lora") as system, system.store() as store:
        for _ in range(2):
            await store.versions.verified(await system.earlier_version(store, tmp_path))
        yield system, store


async def test_an_own_keys_rewards_make_no_version_the_best(served: Any) -> None:
    system, store = served
    await rewarded(store, 1, *[0.8] * 4)
    own, plain = await system.key("own", scope="own"), await system.key("plain")

    async def given(key: Any, mode: str, reward: float) -> list[str]:
        body = {"task_id": "t", "n": 10, "mode": mode, "policy_version": 2}
        ids = [one["rollout_id"] for one in await system.post("/rollouts", body, **key)]
        await system.post("/reward", [{"rollout_id": one, "reward": reward} for one in ids], **key)
        return ids

    async def shown() -> Any:
        """Of each version whether it is the best, and the rewards of the last."""
        versions = (await system.get("/policy/versions", **plain))["data"]
        return [one["best"] for one in versions], versions[-1]["rewards"]

    await given(own, "train", 9.0)
    await given(own, "eval", 9.0)
    await system.post("/rollouts", {"mode": "eval", "policy_version": 1}, **own)
    assert await shown() == ([False, True, False], {})
    await given(plain, "train", 0.9)
    assert await shown() == ([False, False, True], {"train": {"mean": pytest.approx(0.9), "rollouts": 10}})
    ids = await given(await system.key("judge", evaluator=True), "train", 0.1)
    await system.post("/reward", [{"rollout_id": one, "reward": 5.0} for one in ids], **plain)
    await store.rewards.recount()  # as the proxy does in a moment
    assert await shown() == ([False, True, False], {"train": {"mean": pytest.approx(0.1), "rollouts": 10}})


async def test_the_best_version_is_named_and_promoted(served: Any, tmp_path: Path) -> None:
    system, store = served
    code, _, err = await system.lightning("policy", "promote", "best")
    assert (code, err.count("\n")) == (1, 1) and "there is no best version yet" in err
    await store.versions.verified(await system.earlier_version(store, tmp_path))
    await evaluated(store, 2, 0.71)
    await Evaluations(store).begin(3, 3)
    policy = await system.get("/policy")
    assert (policy["best"]["version"], policy["evaluation"]["version"]) == (2, 3)
    _, out, _ = await system.lightning("policy", "list")
    told = {line.split()[0]: line for line in out.splitlines() if line}
    assert "held out" in told["version"] and "0.710" in told["2"] and "begun" in told["3"], out
    assert "the best is version 2: held-out reward 0.710 (0.610 to 0.810)" in out
    _, out, _ = await system.lightning("status")
    assert "version 2: held-out reward 0.710" in out and "version 3 is under way" in out
    assert await system.lightning("policy", "promote", "best") == (0, "policy version 2 is live\n", "")
