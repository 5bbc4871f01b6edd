"""`run --ahead`: rollouts wait for the policy that those before them make, against a real proxy and its store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from traffic.server import config_of

from lightning_proxy.commands.backlog import Backlog
from lightning_proxy.commands.control import ControlClient
from lightning_proxy.proxy.database import opened
from lightning_proxy.proxy.ledger import Ledger
from support.in_process import proxy_of

GROUP = 4


@dataclass
class Work:
    """A proxy without a model: what is opened, rewarded, trained on and published is done by hand."""

    api: ControlClient
    ledger: Ledger

    async def group(self, task: str, rewards: int = GROUP) -> list[str]:
        """Open a group, and end so many of its rollouts by a reward."""
        names = [one.rollout_id for one in await self.api.open_rollouts(task, "train", GROUP)]
        for name in names[:rewards]:
            await self.api.request("POST", "/reward", {"rollout_id": name, "reward": 1.0})
        return names

    async def step(self, names: list[str]) -> int:
        step = await self.ledger.claim(tuple(names), 0)
        await self.ledger.trained(step, "checkpoint", {})
        return step


@pytest.fixture
async def work(tmp_path: Path) -> AsyncIterator[Work]:
    config = config_of("http://127.0.0.1:9", tmp_path)
    async with proxy_of(config) as url, ControlClient(url) as api, opened(config.store) as database:
        yield Work(api, Ledger(database))


async def test_a_group_waits_while_another_runs_and_until_its_step_is_live(work: Work) -> None:
    backlog = Backlog(work.api, GROUP, GROUP)
    await opens(backlog)
    names = await work.group("first", rewards=1)
    await stays_shut(backlog)
    for name in names[1:]:
        await work.api.request("POST", "/reward", {"rollout_id": name, "reward": 0.0})
    await stays_shut(backlog)
    step = await work.step(names)
    await stays_shut(backlog)
    version = await work.ledger.new_version("merged", step, {})
    await work.ledger.saved(version, "weights", "policy")
    await work.ledger.set_live(version, step)
    await opens(backlog)


async def test_a_step_that_was_skipped_is_not_waited_for(work: Work) -> None:
    names = await work.group("first")
    step = await work.ledger.claim(tuple(names), 0)
    await work.ledger.trained(step, None, {"skipped": 1.0})
    await opens(Backlog(work.api, GROUP, GROUP))


async def test_what_teaches_nothing_is_not_waited_for(work: Work) -> None:
    names = await work.group("first")
    await stays_shut(Backlog(work.api, GROUP, GROUP))
    await work.ledger.drop({"all rewards of the group are equal": names})
    await opens(Backlog(work.api, GROUP, GROUP))


async def test_so_many_groups_are_opened_as_there_is_room_for(work: Work) -> None:
    backlog = Backlog(work.api, 2 * GROUP, GROUP)
    await opens(backlog)
    await opens(backlog)
    await work.group("first")
    await work.group("second")
    await stays_shut(backlog)


async def test_a_group_larger_than_the_limit_is_opened_alone(work: Work) -> None:
    backlog = Backlog(work.api, 1, GROUP)
    await opens(backlog)
    await work.group("first")
    await stays_shut(backlog)


async def opens(backlog: Backlog) -> None:
    await asyncio.wait_for(backlog.wait(), 10)


async def stays_shut(backlog: Backlog) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backlog.wait(), 0.6)
