"""`run --refill`: further groups in place of those that taught nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traffic.server import config_of

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.refill import Refill
from lightning_proxy.commands.run.run import RunOptions, run_tasks
from lightning_proxy.commands.run.tasks import Task
from support.in_process import proxy_of

GROUP = 2
Reward = Callable[[str, int], float | None]


@dataclass
class RewardingRunner:
    """A program that posts a reward, by its task and by how many ran for that task before; None: it posts none."""

    api: ApiClient
    reward: Reward
    ran: list[str] = field(default_factory=list)

    async def run(self, env: Mapping[str, str], log: Path) -> int:
        task = env["LIGHTNING_TASK"]
        before = self.ran.count(task)
        self.ran.append(task)
        await asyncio.sleep(0)
        reward = self.reward(task, before)
        if reward is not None:
            body = {"rollout_id": env["LIGHTNING_ROLLOUT_ID"], "reward": reward}
            await self.api.request("POST", "/reward", body)
        return 0

    async def close(self) -> None: ...


async def groups_run(tmp_path: Path, reward: Reward, limit: int) -> tuple[list[str], Refill]:
    """The tasks of all groups that ran on tasks a, b and c, in order of opening, and the refill at the end."""
    tasks = [Task(name, name) for name in "abc"]
    async with proxy_of(config_of("http://127.0.0.1:9", tmp_path)) as url, ApiClient(url) as api:
        runner, refill = RewardingRunner(api, reward), Refill(tasks, limit)
        options = RunOptions(GROUP, concurrency=3)
        results = await run_tasks(api, tasks, runner, options, refill=refill)
        page = await api.rollouts(mode="train")
        opened = [one["task_id"] for one in reversed(page["data"])]
        assert len(results) == len(opened)
        return opened[::GROUP], refill


async def test_a_group_that_taught_nothing_is_replaced_by_one_of_a_task_that_does(tmp_path: Path) -> None:
    def reward(task: str, before: int) -> float:
        return float(task == "b" and before % GROUP)  # only b's rewards differ

    opened, refill = await groups_run(tmp_path, reward, limit=10)
    assert opened[:3] == ["a", "b", "c"] and opened[3:].count("b") >= 1
    taught = opened.count("b")
    assert (taught, refill.missing) == (3, 0), "as many groups that teach as tasks"


async def test_further_groups_have_a_bound(tmp_path: Path) -> None:
    opened, refill = await groups_run(tmp_path, lambda task, before: 1.0, limit=4)
    assert (len(opened), refill.missing) == (3 + 4, 3)
    assert sorted(opened[3:]) == ["a", "a", "b", "c"], "all tasks in turn"


async def test_without_a_refill_nothing_more_is_opened(tmp_path: Path) -> None:
    opened, _ = await groups_run(tmp_path, lambda task, before: 1.0, limit=0)
    assert opened == ["a", "b", "c"]


async def test_rewards_that_have_not_arrived_ask_for_no_further_group(tmp_path: Path) -> None:
    opened, _ = await groups_run(tmp_path, lambda task, before: None if before else 1.0, limit=9)
    assert opened == ["a", "b", "c"]


def ended(refill: Refill, **results: Any) -> None:
    for rollout_id, (code, reward) in results.items():
        refill.ended(rollout_id, reward, failed=code != 0)


async def test_programs_that_failed_say_nothing_of_their_group() -> None:
    task = Task("a", "a")
    refill = Refill([task], 9)
    refill.opened(task, ["r0", "r1"])
    ended(refill, r0=(1, None), r1=(1, None))
    assert await refill.next() is None, "a program that always fails is not run for ever"
    refill.opened(task, ["r2", "r3", "r4"])
    ended(refill, r2=(1, None), r3=(0, 1.0), r4=(0, 1.0))
    assert await refill.next() == task
