"""Which version is the best: by evaluations, else by smoothed rewards; and what a promotion of `best` makes live."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.evaluation.evaluations import Evaluations, HeldOut
from lightning_proxy.proxy.promotion.promotions import Promotions
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.store import Store
from support.stores import store_url

Running = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield Store(database)


async def published(store: Store, count: int) -> None:
    for step in range(1, count + 1):
        version = await store.versions.new("lora", step, {})
        await store.versions.saved(version, f"/v{version}", f"policy-v{version}")
        await store.versions.set_live(version)


async def evaluated(store: Store, version: int, reward: float) -> None:
    evaluations = Evaluations(store.database)
    await evaluations.begin(version, version)
    found = HeldOut(version, version, 0.0, reward=reward, low=reward - 0.1, high=reward + 0.1, tasks=1, rollouts=4)
    await evaluations.ended(found, {"t": reward})


async def test_the_best_is_the_highest_of_those_that_can_be_served(store: Store) -> None:
    evaluations = Evaluations(store.database)
    await published(store, 4)
    assert await evaluations.choose({}) is None
    best = await evaluations.choose({1: 0.5, 2: 0.7, 3: 0.7})
    assert best is not None and (best.version, best.judged) == (2, "reward")
    later = await evaluations.choose({3: 0.6, 4: 0.65})
    assert later == best == await evaluations.best(), "it keeps the reward that it had"
    await store.versions.failed(2, "it does not verify")
    assert await evaluations.best() is None
    best = await evaluations.choose({3: 0.6, 4: 0.65})
    assert best is not None and best.version == 4


async def test_a_version_that_no_agent_got_for_certain_is_not_the_best(store: Store) -> None:
    evaluations = Evaluations(store.database)
    await published(store, 1)
    for step in (2, 3):
        version = await store.versions.new("merged", step, {})
        await store.versions.saved(version, f"/v{version}", None)
    await Promotions(store.database).wait(2, 2)  # a gate has not let it through
    best = await evaluations.choose({0: 0.1, 1: 0.2, 2: 0.9})
    assert best is not None and best.version == 1
    await store.versions.set_live(3)
    best = await evaluations.choose({1: 0.2, 3: 0.8})
    assert best is not None and best.version == 3
    await store.versions.set_live(1)  # by hand, before its weights were seen to be served
    best = await evaluations.choose({1: 0.2, 3: 0.8})
    assert best is not None and best.version == 1


async def test_evaluations_count_before_rewards(store: Store) -> None:
    evaluations = Evaluations(store.database)
    await published(store, 3)
    await evaluated(store, 1, 0.4)
    await evaluated(store, 3, 0.3)
    best = await evaluations.choose({2: 0.9})
    assert best is not None and (best.version, best.judged) == (1, "evaluation")
    assert best.story == "version 1: held-out reward 0.400 (0.300 to 0.500)"
    assert await evaluations.first() == (1, {"t": 0.4})
    await store.versions.forget_files(1)
    best = await evaluations.choose({2: 0.9})
    assert best is not None and best.version == 3


async def test_the_best_version_is_named_and_promoted(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        code, _, err = await system.lightning("policy", "promote", "best")
        assert (code, err.count("\n")) == (1, 1) and "too few steps" in err
        for _ in range(3):
            await store.versions.verified(await system.earlier_version(store, tmp_path))
        await evaluated(store, 2, 0.71)
        await Evaluations(store.database).begin(3, 3)
        await Evaluations(store.database).choose({})
        _, policy = await system.call("GET", "/policy")
        assert (policy["best"]["version"], policy["evaluation"]["version"]) == (2, 3)
        _, out, _ = await system.lightning("policy", "list")
        told = {line.split()[0]: line for line in out.splitlines() if line}
        assert "held out" in told["version"] and "0.710" in told["2"] and "begun" in told["3"], out
        assert "the best is version 2: held-out reward 0.710 (0.610 to 0.810)" in out
        _, out, _ = await system.lightning("policy", "list", "--json")
        assert [v["best"] for v in json.loads(out)["data"]] == [False, False, True, False]
        _, out, _ = await system.lightning("status")
        assert "version 2: held-out reward 0.710" in out and "version 3 is under way" in out
        assert await system.lightning("policy", "promote", "best") == (0, "policy version 2 is live\n", "")
        code, _, err = await system.lightning("policy", "promote", "worst")
        assert (code, err.count("\n")) == (2, 1)
