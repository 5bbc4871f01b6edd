"""What is read of versions, steps and rollouts: each the few that it needs, and a search is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallStart, Reward, RolloutName
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store import rollouts as searching
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.stores import store_url


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield Store(database)


async def published(store: Store, adapters: tuple[str, ...] = (), *, checkpoint: bool = True) -> int:
    """A version that was live, of a step with a checkpoint."""
    step = await store.steps.claim([], 0)
    await store.steps.trained(step, f"step-{step}" if checkpoint else None, {})
    version = await store.versions.new("lora", step, {})
    served = f"policy-v{version}"
    await store.versions.saved(version, served, served, {name: f"{served}.{name}" for name in adapters})
    await store.versions.set_live(version, step)
    return version


async def test_a_version_is_found_by_each_name_that_it_is_served_under(store: Store) -> None:
    for adapters in ((), ("planner", "coder.small"), ()):
        await published(store, adapters)
    names = {"policy-v1": 1, "policy-v2": 2, "policy-v2.planner": 2, "policy-v2.coder.small": 2, "policy-v3": 3}
    names |= dict.fromkeys(("policy-v2.coder", "policy-v1.planner", "policy-v4", "policy", "", "."))
    assert {name: await store.versions.named(name) for name in names} == names


async def test_what_is_to_be_served_is_what_is_live_tested_or_pinned_and_has_files(store: Store) -> None:
    for _ in range(5):
        await published(store)
    candidate = await store.versions.new("lora", 5, {})
    await store.versions.saved(candidate, "path", "policy-v6")
    await Promotions(store.database).begin(candidate, 5, 5)
    await store.versions.forget_files(2)
    assert [v.version for v in await store.versions.to_serve({0, 2, 3})] == [3, 5, 6]
    assert [v.version for v in await store.versions.with_files()] == [1, 3, 4, 5, 6]
    assert [v.version for v in await store.versions.of_status("candidate")] == [6]


async def test_old_checkpoints_are_those_of_no_version_with_files(store: Store) -> None:
    for checkpoint in (True, True, False, True, True, True):
        await published(store, checkpoint=checkpoint)
    for version in (1, 3, 4):
        await store.versions.forget_files(version)
    assert await store.steps.old_checkpoints(2) == [(1, "step-1"), (4, "step-4")]
    assert await store.steps.old_checkpoints(9) == []


async def test_a_rollout_that_began_too_long_ago_holds_no_version(store: Store) -> None:
    async with Recorder(store, merged=False) as recorder:
        for n, at in ((0, 1000.0), (7, 5000.0)):
            name = RolloutName(f"r{n}")
            await recorder.start(CallStart(f"c{n}", name, "chat/completions", "policy", n, {"messages": []}, at))
    assert [await store.rollouts.opened_for(f"r{n}") for n in (0, 7)] == [(None, 0), (None, 7)]
    for since, wanted in ((400.0, {0, 7}), (3400.0, {7}), (5400.0, set())):
        assert await store.versions.pinned(since) == wanted


async def rewarded(store: Any, rewards: dict[str, float | None]) -> None:
    for name in rewards:
        await store.rollouts.open([(RolloutName(name, "t"), f"hash of {name}")], {})
    await store.rewards.post([Reward(name, value) for name, value in rewards.items() if value is not None])


async def ids(store: Any, limit: int = 100, cursor: int | None = None, **filters: object) -> list[str]:
    return [r.rollout_id for r in (await store.rollouts.page(filters, limit, cursor))[0]]


async def test_a_search_looks_at_so_many_and_can_go_on(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "CHUNK", 2)
    monkeypatch.setattr(searching, "MOST", 4)
    async with running(tmp_path) as system, system.store() as store:
        await rewarded(store, {f"r{i}": float(i == 0) for i in range(6)})
        found, cursor = await store.rollouts.page({"min_reward": 1}, 9)
        assert found == [] and cursor is not None
        assert await ids(store, min_reward=1, cursor=cursor) == ["r0"]


async def test_texts_are_found_as_they_were_said(running: Any, tmp_path: Path) -> None:
    texts = ['say "50%_off"', "ÄPFEL sind", "two\nlines", "!"]
    async with running(tmp_path) as system:
        for i, text in enumerate([*texts, "something else: 50 off"]):
            said = {"model": "policy", "messages": [{"role": "user", "content": f"please {text} now"}]}
            await system.call("POST", "/v1/chat/completions", said, X_Rollout_Id=f"r{i}")
        async with system.store() as store:
            assert [await ids(store, text=text) for text in texts] == [["r0"], ["r1"], ["r2"], ["r3"]]
            assert await ids(store, text="NOTHING of it") == []
