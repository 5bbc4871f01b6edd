"""`run --ahead`: rollouts wait for the policy that those before them make, against a real proxy and its store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
from traffic.server import config_of

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.limits import Backlog, PolicyCollapsed
from lightning_proxy.core.config.root import Config
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import Collapse
from support.served import proxy_of

GROUP = 4


class Looks(ApiClient):
    """Counts how often somebody looked at the policy, and so at the rollouts."""

    looks = 0

    async def policy(self) -> dict[str, object]:
        self.looks += 1
        return await super().policy()


@dataclass
class Work:
    """A proxy without a model: what is opened, rewarded, trained on and published is done by hand."""

    api: Looks
    store: Store
    said: list[str] = field(default_factory=list)

    def backlog(self, limit: int = GROUP) -> Backlog:
        return Backlog(self.api, limit, GROUP, self.said.append)

    async def group(self, backlog: Backlog, task: str, rewards: int = GROUP) -> list[str]:
        """Open a group, end all of its programs, and so many of its rollouts by a reward."""
        names = [one.rollout_id for one in await self.api.open_rollouts(task, "train", GROUP)]
        backlog.opened(names)
        for name in names[:rewards]:
            await self.api.request("POST", "/reward", {"rollout_id": name, "reward": 1.0})
        for name in names:
            backlog.ended({"rollout_id": name})
        return names

    async def step(self, names: list[str], dropped: list[str] | None = None) -> int:
        step = await self.store.steps.claim(tuple(names), 0, {"equal": dropped or []})
        await self.store.steps.trained(step, "checkpoint", {})
        return step

    async def publish(self, step: int) -> None:
        version = await self.store.versions.new("merged", step, {})
        await self.store.versions.saved(version, "weights", "policy")
        await self.store.versions.set_live(version, step)

    async def stays_shut(self, backlog: Backlog) -> None:
        """It has looked at what there is, twice, and goes on waiting."""
        waiting, looks = asyncio.ensure_future(backlog.wait()), self.api.looks
        while self.api.looks < looks + 3:
            assert not waiting.done()
            await asyncio.sleep(0.01)
        waiting.cancel()


@pytest.fixture
async def work(tmp_path: Path) -> AsyncIterator[Work]:
    config = config_of("http://127.0.0.1:9", tmp_path)
    async with proxy_of(config) as url, Looks(url) as api, opened(config.store) as database:
        yield Work(api, Store(database))


async def test_a_group_waits_until_the_step_of_the_one_before_is_live(work: Work) -> None:
    backlog = work.backlog(1)  # a group is opened alone, however large it is
    assert await opens(backlog)
    names = [one.rollout_id for one in await work.api.open_rollouts("first", "train", GROUP)]
    backlog.opened(names)
    await work.stays_shut(backlog)
    for name in names:
        await work.api.request("POST", "/reward", {"rollout_id": name, "reward": 1.0})
        backlog.ended({"rollout_id": name})
    await work.stays_shut(backlog)
    assert await opens(work.backlog()), "those of another run are not waited for"
    step = await work.step(names)
    await work.stays_shut(backlog)
    await work.publish(step)
    assert await opens(backlog)


async def test_what_a_step_drops_is_waited_for_until_that_step_is_live(work: Work) -> None:
    backlog = work.backlog(2 * GROUP)
    taken, dropped = await work.group(backlog, "first"), await work.group(backlog, "second")
    step = await work.step(taken, dropped)
    await work.stays_shut(backlog)
    await work.publish(step)
    assert await opens(backlog)


@pytest.mark.parametrize("status", ["running", "completed", "failed", "discarded"])
async def test_rollouts_without_a_reward_are_not_waited_for(work: Work, status: str) -> None:
    backlog = work.backlog()
    for name in await work.group(backlog, "first", rewards=0):
        if status != "running":
            await work.api.end_rollout(name, status)
    assert await opens(backlog)


async def test_rollouts_that_no_step_will_publish_are_not_waited_for(work: Work) -> None:
    """Those of a step that changed no weights, those that are dropped without a step, and deleted ones."""
    backlog = work.backlog()
    step = await work.store.steps.claim(tuple(await work.group(backlog, "first")), 0)
    await work.store.steps.trained(step, None, {"skipped": 1.0})
    assert await opens(backlog)
    names = await work.group(backlog, "second")
    await work.stays_shut(backlog)
    await work.store.steps.drop({"all rewards of the group are equal": names})
    assert await opens(backlog)
    for name in await work.group(backlog, "third"):
        await work.api.delete_rollout(name)
    assert await opens(backlog)


async def test_rollouts_whose_rewarder_has_not_spoken_are_waited_for_and_it_says_so(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.commands.run.limits.PATIENCE_S", 0.0)
    await work.store.rollouts.use_function("rewards:score")
    backlog = work.backlog()
    for name in await work.group(backlog, "first", rewards=0):
        await work.api.end_rollout(name, "completed")
    await work.stays_shut(backlog)
    assert work.said == ["waiting for the trainer: 4 rollouts are not yet in the live weights"]
    await work.store.rollouts.use_function(None)
    assert await opens(backlog)


async def test_as_many_groups_are_opened_as_there_is_room_for(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_proxy.commands.run.limits.PAGE", 2)
    backlog, groups = work.backlog(3 * GROUP + 1), []
    for task in ("first", "second", "third"):
        assert await opens(backlog)
        groups.append(await work.group(backlog, task))
    await work.stays_shut(backlog)
    await work.store.steps.drop({"equal": groups[0]})
    assert await opens(backlog)


async def test_a_collapse_ends_the_wait_and_says_why(work: Work) -> None:
    backlog = work.backlog()
    step = await work.store.steps.claim(tuple(await work.group(backlog, "first")), 0)
    collapse = Collapse("reward", "fell by half", time.time(), (await work.store.versions.live()).live_at, 0)
    await work.store.steps.trained(step, "checkpoint", {"collapse": asdict(collapse)})
    with pytest.raises(PolicyCollapsed, match="fell by half"):
        await backlog.wait()


async def test_a_test_of_a_new_version_holds_nothing_back(work: Work) -> None:
    backlog = work.backlog()
    names = await work.group(backlog, "t1")
    await work.stays_shut(backlog)
    step = await work.step(names)
    version = await work.store.versions.new("merged", step, {})
    await work.store.versions.saved(version, "weights", "policy")
    await Promotions(work.store.database).begin(version, step, 0)
    assert await opens(backlog)
    await work.group(backlog, "t2")
    assert await opens(backlog), "though no step has taken these"


async def test_a_step_that_is_not_tested_holds_nothing_back_behind_a_gate(tmp_path: Path) -> None:
    policy = {"publish": "lora", "directory": tmp_path / "policy"}
    upstream = {"name": "policy", "base_url": "http://127.0.0.1:9/v1"}
    store = {"url": f"sqlite:///{tmp_path}/store.db"}
    config = Config.model_validate(
        {"store": store, "upstreams": [upstream], "policy": policy, "promotion": {"mode": "gated"}}
    )
    async with proxy_of(config) as url, Looks(url) as api, opened(config.store) as database:
        work = Work(api, Store(database))
        backlog = work.backlog()
        names = await work.group(backlog, "t1")
        await work.stays_shut(backlog)
        await work.step(names)
        assert await opens(backlog)


async def opens(backlog: Backlog) -> bool:
    """Whether it lets a group pass, of which a hanging test would say nothing."""
    try:
        await asyncio.wait_for(backlog.wait(), 30)
    except TimeoutError:
        return False
    return True
