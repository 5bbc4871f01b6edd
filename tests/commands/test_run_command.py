"""The `run` command against a real proxy: what it opens, resumes, says and, with `--ahead`, waits for."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from traffic.server import config_of

from lightning_proxy.commands.api_client import ApiClient
from lightning_proxy.commands.run.command import problem
from lightning_proxy.commands.run.limits import Backlog, PolicyCollapsed
from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import Collapse
from lightning_proxy.store.waiting import EQUAL_REWARDS
from support.judging import judging, ordered
from support.sections import TrainerConfig
from support.served import proxy_of

CALLS = """
import openai
with openai.OpenAI() as llm:
    llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
"""
REWARDS = "from lightning_proxy import client\nclient.emit_reward(1.0)\n"
REWARDS_EVERY_OTHER = f"""
import pathlib
seen = pathlib.Path('seen.txt')
seen.write_text((seen.read_text() if seen.exists() else '') + 'x')
assert len(seen.read_text()) not in (2, 4)
{REWARDS}
"""


async def test_programs_that_end_complete_their_rollouts_and_siblings_may_wait_for_each_others_judge(
    running: Any, tmp_path: Path
) -> None:
    tasks, agent = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    tasks.write_text('{"task_id": "t1"}\n')
    agent.write_text(CALLS)
    async with judging(ordered(lambda text: 1.0)) as judge:
        use = {"kind": "rank", "model": "openai/m", "api_base": f"{judge.url}/v1"}
        async with running(tmp_path, rewards={"use": [use]}) as system:
            options = ("--tasks", tasks, "--group-size", "3", "--concurrency", "1", "--json")
            code, out, err = await system.lightning("run", *options, "--", sys.executable, agent)
            assert (code, json.loads(out)["mean_reward"], json.loads(out)["without_reward"]) == (0, 0.5, 0), err
            _, page = await system.call("GET", "/rollouts")
    assert [(r["status"], r["reason"]) for r in page["data"]] == [("completed", "the program ended")] * 3


async def test_a_run_is_no_further_ahead_of_the_policy_than_it_may_be(running: Any, tmp_path: Path) -> None:
    tasks, agent = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    tasks.write_text('{"task_id": "t1"}\n{"task_id": "t2"}\n')
    agent.write_text(REWARDS)
    async with running(tmp_path, trainer={"group_size": 2, "tasks_per_step": 1}) as system, system.store() as store:
        options = ("--tasks", tasks, "--ahead", "0", "--concurrency", "4", "--json")
        run = asyncio.create_task(system.lightning("run", *options, "--", sys.executable, agent))
        async with asyncio.timeout(60):
            while (await store.rollouts.counts()).get(("train", "completed")) != 2:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        _, page = await system.call("GET", "/rollouts")
        assert [one["task_id"] for one in page["data"]] == ["t1", "t1"]
        step = await store.steps.claim(tuple(one["rollout_id"] for one in page["data"]), 0)
        await store.steps.trained(step, None, {"skipped": 1.0})
        code, out, err = await run
    assert (code, json.loads(out)["rollouts"]) == (0, 4), err


async def test_that_nothing_is_learned_is_said_at_the_end_and_in_status(running: Any, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t1"}\n')
    async with running(tmp_path) as system, system.store() as store:
        names = [f"r{i}" for i in range(3 * 64)]
        await store.rollouts.open([(RolloutName(name, "t0"), f"hash of {name}") for name in names], {})
        await store.rewards.post([Reward(name, 0.5) for name in names])
        await store.steps.drop({EQUAL_REWARDS: names})
        _, _, said = await system.lightning("run", "--tasks", tasks, "--group-size", "1", "--", "true")
        _, status, _ = await system.lightning("status")
    assert said.replace("\n", " ").count("nothing was learned from the newest 192 rollouts (mean reward 0.5)") == 1
    assert " ".join(status.split()).count("nothing was learned from the newest 192 rollouts") == 1


async def test_a_reward_function_that_always_fails_is_told_at_the_end_of_a_run(running: Any, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t1"}\n')
    (tmp_path / "scoring.py").write_text("def reward(rollout):\n    raise ValueError('no')\n")
    async with running(tmp_path, rewards={"function": f"{tmp_path}/scoring.py:reward"}) as system:
        options = ("--tasks", tmp_path / "tasks.jsonl", "--group-size", "2")
        code, _, err = await system.lightning("run", *options, "--", "true")
    assert code == 0
    assert "2 completed rollouts of the newest 200 have no reward, so no step takes them" in " ".join(err.split()), err


MISSING = "a step takes 8 groups (trainer.tasks_per_step), and {} missing ones come"


@pytest.mark.parametrize(
    ("trainer", "size", "passes", "waiting", "told"),
    [
        ({}, 1, 1, 0, "no step will be taken"),
        ({"lone_rollouts": "running"}, 1, 1, 0, ""),
        ({"compare": "step"}, 1, 1, 0, ""),
        ({"group_size": 2, "tasks_per_step": 2}, 1, 2, 0, ""),
        ({"group_size": 4}, 1, 2, 0, "a task gets 2 rollouts"),
        ({}, 8, 3, 0, MISSING.format("6 of 8")),
        ({}, 8, 3, 15, MISSING.format("6 of 7")),
        ({}, 8, 3, 16, ""),
        ({}, 8, 4, 0, ""),
        ({"group_size": 4}, 1, 4, 0, MISSING.format("2 of 8")),
        ({"schedule": {"when": "rollouts"}}, 8, 1, 0, ""),
    ],
)
def test_rollouts_are_judged_by_what_the_trainer_compares_and_a_step_takes(
    trainer: dict[str, Any], size: int, passes: int, waiting: int, told: str
) -> None:
    tasks = [Task("t1", "{}"), Task("t2", "{}")] * passes
    said = problem(TrainerConfig.model_validate(trainer), tasks, size, waiting) or ""
    assert said.startswith(told) and bool(said) == bool(told)


async def test_groups_of_one_task_are_resumed_each_on_its_own(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(REWARDS_EVERY_OTHER)
    Path("tasks.jsonl").write_text('{"task_id": "a"}\n')
    options = ("--tasks", "tasks.jsonl", "--group-size", "2", "--repeat", "2", "--concurrency", "1", "--resume", "kept")
    async with running(tmp_path) as system:
        for ran in ("xxxx", "xxxxxx", "xxxxxx"):
            code, _, err = await system.lightning("run", *options, "--", sys.executable, "agent.py")
            assert (code, Path("seen.txt").read_text()) == (0, ran), err
        async with system.store() as store:
            groups = await store.waiting.groups()
    assert [(group.task_id, group.rewarded) for group in groups] == [("a", 2), ("a", 2)]


async def test_a_resumed_run_begins_no_rollout_anew_that_awaits_its_reward(running: Any, tmp_path: Path) -> None:
    tasks, scoring, kept = tmp_path / "tasks.jsonl", tmp_path / "scoring.py", tmp_path / "kept"
    tasks.write_text('{"task_id": "t1"}\n')
    scoring.write_text("import time\ndef reward(rollout):\n    time.sleep(600)\n")
    async with running(tmp_path, rewards={"function": f"{scoring}:reward"}) as system:
        _, (one,) = await system.call("POST", "/rollouts", {"task_id": "t1"})
        name = one["rollout_id"]
        await system.chat(name)
        await system.call("POST", f"/rollouts/{name}/end", {"status": "completed"})
        kept.write_text(f"rollout {name} of the group of {name}\n")
        options = ("--tasks", tasks, "--group-size", "1", "--resume", kept, "--json")
        code, out, err = await system.lightning("run", *options, "--", "false")
        assert code == 0, err
        found = json.loads(out)
        assert (found["rollouts"], found["failed"], found["without_reward"]) == (1, 0, 1)


# --ahead

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

    async def opens(self, backlog: Backlog) -> bool:
        """Whether it lets a group pass, of which a hanging test would say nothing."""
        return await asyncio.wait_for(backlog.wait(), 30)

    async def stays_shut(self, backlog: Backlog) -> None:
        """It has looked at what there is, twice, and goes on waiting."""
        waiting, looks = asyncio.ensure_future(backlog.wait()), self.api.looks
        while self.api.looks < looks + 3:
            assert not waiting.done()
            await asyncio.sleep(0.01)
        waiting.cancel()


@asynccontextmanager
async def working(config: Config) -> AsyncIterator[Work]:
    async with proxy_of(config) as url, Looks(url) as api, opened(config.store) as database:
        yield Work(api, Store(database))


@pytest.fixture
async def work(tmp_path: Path) -> AsyncIterator[Work]:
    async with working(config_of("http://127.0.0.1:9", tmp_path)) as found:
        yield found


async def test_a_group_waits_until_the_step_of_the_one_before_is_live(work: Work) -> None:
    backlog = work.backlog(1)  # a group is opened alone, however large it is
    assert await work.opens(backlog)
    names = [one.rollout_id for one in await work.api.open_rollouts("first", "train", GROUP)]
    backlog.opened(names)
    await work.stays_shut(backlog)
    for name in names:
        await work.api.request("POST", "/reward", {"rollout_id": name, "reward": 1.0})
        backlog.ended({"rollout_id": name})
    await work.stays_shut(backlog)
    assert await work.opens(work.backlog()), "those of another run are not waited for"
    step = await work.step(names[:2], names[2:])
    await work.stays_shut(backlog)
    await work.publish(step)
    assert await work.opens(backlog), "what the step dropped does not count any more either"


async def test_rollouts_that_no_step_will_publish_are_not_waited_for(work: Work) -> None:
    """Those without a reward, of a step that changed no weights, dropped without a step, and deleted."""
    for status in ("running", "completed", "failed", "discarded"):
        backlog = work.backlog()
        for name in await work.group(backlog, status, rewards=0):
            if status != "running":
                await work.api.end_rollout(name, status)
        assert await work.opens(backlog), status
    backlog = work.backlog()
    step = await work.store.steps.claim(tuple(await work.group(backlog, "first")), 0)
    await work.store.steps.trained(step, None, {"skipped": 1.0})
    assert await work.opens(backlog)
    names = await work.group(backlog, "second")
    await work.stays_shut(backlog)
    await work.store.steps.drop({"all rewards of the group are equal": names})
    assert await work.opens(backlog)
    for name in await work.group(backlog, "third"):
        await work.api.delete_rollout(name)
    assert await work.opens(backlog)


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
    assert await work.opens(backlog)


async def test_as_many_groups_are_opened_as_there_is_room_for(work: Work) -> None:
    backlog, groups = work.backlog(3 * GROUP + 1), []
    for task in ("first", "second", "third"):
        assert await work.opens(backlog)
        groups.append(await work.group(backlog, task))
    await work.stays_shut(backlog)
    await work.store.steps.drop({"equal": groups[0]})
    assert await work.opens(backlog)


async def test_a_collapse_ends_the_wait_and_says_why(work: Work) -> None:
    backlog = work.backlog()
    step = await work.store.steps.claim(tuple(await work.group(backlog, "first")), 0)
    collapse = Collapse("reward", "fell by half", time.time(), (await work.store.versions.live()).live_at, 0)
    await work.store.steps.trained(step, "checkpoint", {"collapse": asdict(collapse)})
    with pytest.raises(PolicyCollapsed, match="fell by half"):
        await backlog.wait()


@pytest.mark.parametrize("is_tested", [True, False])
async def test_a_step_whose_version_is_tested_or_will_be_holds_nothing_back(tmp_path: Path, is_tested: bool) -> None:
    policy = {"publish": "lora", "directory": tmp_path / "policy"}
    upstream = {"name": "policy", "base_url": "http://127.0.0.1:9/v1"}
    gate = {} if is_tested else {"promotion": {"mode": "gated"}}
    config = Config.model_validate(
        {"store": {"url": f"sqlite:///{tmp_path}/s.db"}, "upstreams": [upstream], "policy": policy, **gate}
    )
    async with working(config) as work:
        backlog = work.backlog()
        names = await work.group(backlog, "t1")
        await work.stays_shut(backlog)
        step = await work.step(names)
        if is_tested:
            version = await work.store.versions.new("lora", step, {})
            await work.store.versions.saved(version, "weights", "policy")
            await Promotions(work.store.database).begin(version, step, 0)
            assert await work.opens(backlog)
            await work.group(backlog, "t2")
        assert await work.opens(backlog), "though no step has taken the last group"
