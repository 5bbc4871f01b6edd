"""What a call, a second and a step read of versions and steps: each the few that it needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.features.promotion.promotions import Promotions
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
