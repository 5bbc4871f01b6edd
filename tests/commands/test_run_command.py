"""The `run` command against a real proxy: what it opens, resumes, says and, with `--ahead`, waits for."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from contract.system import Done, Json, Proxy, in_a_thread, in_this_process, ok
from lightning_proxy.commands.run.command import problem
from lightning_proxy.commands.run.limits import Backlog, PolicyCollapsed
from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import Collapse
from lightning_proxy.store.waiting import EQUAL_REWARDS
from support.judging import judging, ordered
from support.sections import TrainerConfig

CALLS = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""
REWARDS = "from lightning_proxy import client\nclient.emit_reward(1.0)\n"
REWARDS_EVERY_OTHER = f"""
import pathlib
seen = pathlib.Path('seen.txt')
seen.write_text((seen.read_text() if seen.exists() else '') + 'x')
assert len(seen.read_text()) not in (2, 4)
{REWARDS}
"""


def run(proxy: Proxy, *options: str, agent: str = "", tasks: str = "a") -> Done:
    """Run a program on tasks with these names."""
    (proxy.directory / "tasks.jsonl").write_text("".join(f'{{"task_id": "{task}"}}\n' for task in tasks))
    (proxy.directory / "agent.py").write_text(agent)
    return proxy.run("run", "--tasks", "tasks.jsonl", *options, "--", sys.executable, "agent.py")


def facts(proxy: Proxy, *names: str) -> list[list[Any]]:
    return [[one[name] for name in names] for one in proxy.get("/rollouts")["data"]]


@pytest.mark.feature("judge")
def test_programs_that_end_complete_their_rollouts_and_siblings_may_wait_for_each_others_judge(tmp_path: Path) -> None:
    judge: Any
    with (
        in_a_thread(judging(ordered(lambda text: 1.0))) as judge,
        in_this_process(tmp_path, judge={"use": [{"kind": "rank"} | judge.asking()]}) as proxy,
    ):
        found = ok(run(proxy, "--group-size", "3", "--concurrency", "1", "--json", agent=CALLS)).json
        assert (found["mean_reward"], found["without_reward"]) == (0.5, 0)
        assert facts(proxy, "status", "reason") == [["completed", "the program ended"]] * 3


async def test_a_run_is_no_further_ahead_of_the_policy_than_it_may_be(tmp_path: Path) -> None:
    with in_this_process(tmp_path, trainer={"group_size": 2, "tasks_per_step": 1}) as proxy:
        options = ("--ahead", "0", "--concurrency", "4", "--json")
        running = asyncio.create_task(asyncio.to_thread(run, proxy, *options, agent=REWARDS, tasks="ab"))
        async with asyncio.timeout(60), opened(load_config(proxy.config).store) as database:
            while facts(proxy, "task_id", "status") != [["a", "completed"]] * 2:
                await asyncio.sleep(0.05)
            store, names = Store(database), [name for (name,) in facts(proxy, "rollout_id")]
            step = await store.steps.claim(names[:1], 0, {"equal": names[1:]})
            await store.steps.trained(step, "checkpoint", {})
            await asyncio.sleep(1.0)
            assert len(facts(proxy, "task_id")) == 2, "it waits until the step's version is live"
            version = await store.versions.new("merged", step, {})
            await store.versions.saved(version, "weights", "base")
            await store.versions.set_live(version, step)
            assert ok(await running).json["rollouts"] == 4


async def test_that_nothing_is_learned_is_said_at_the_end_and_in_status(tmp_path: Path) -> None:
    with in_this_process(tmp_path) as proxy:
        async with opened(load_config(proxy.config).store) as database:
            store, names = Store(database), [f"r{i}" for i in range(3 * 64)]
            await store.rollouts.open([(RolloutName(name, "t0"), f"hash of {name}") for name in names], {})
            await store.rewards.post([Reward(name, 0.5) for name in names])
            await store.steps.drop({EQUAL_REWARDS: names})
        for said in (
            (await asyncio.to_thread(run, proxy, "--group-size", "1")).stderr,
            (await asyncio.to_thread(proxy.run, "status")).stdout,
        ):
            told = "nothing was learned from the newest 192 rollouts (mean reward 0.5)"
            assert " ".join(said.split()).count(told) == 1, said


def test_a_reward_function_that_always_fails_is_told_at_the_end_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "scoring.py").write_text("def reward(rollout):\n    raise ValueError('no')\n")
    with in_this_process(tmp_path, rewards={"function": f"{tmp_path}/scoring.py:reward"}) as proxy:
        said = ok(run(proxy, "--group-size", "2")).stderr
    assert "2 completed rollouts of the newest 200 have no reward, so no step takes them" in " ".join(said.split())


MISSING = "a step takes 8 groups (trainer.tasks_per_step), and this run adds {} that are missing"


@pytest.mark.parametrize(
    ("trainer", "size", "passes", "waiting", "told"),
    [
        ({}, 1, 1, 0, "no step will be taken"),
        ({"lone_rollouts": "running"}, 1, 1, 0, ""),
        ({"compare": "step"}, 1, 1, 0, ""),
        ({"group_size": 2, "tasks_per_step": 2}, 1, 2, 0, ""),
        ({"group_size": 4}, 1, 2, 0, "a task gets 2 rollouts"),
        ({}, 8, 3, 15, MISSING.format("6 of the 7")),
        ({}, 8, 3, 16, ""),
        ({"group_size": 4}, 1, 4, 0, MISSING.format("2 of the 8")),
        ({"schedule": {"when": "rollouts"}}, 8, 1, 0, ""),
    ],
)
def test_rollouts_are_judged_by_what_the_trainer_compares_and_a_step_takes(
    trainer: dict[str, Any], size: int, passes: int, waiting: int, told: str
) -> None:
    tasks = [Task("t1", "{}"), Task("t2", "{}")] * passes
    said = problem(TrainerConfig.model_validate(trainer), tasks, size, waiting) or ""
    assert said.startswith(told) and bool(said) == bool(told)


def test_groups_of_one_task_are_resumed_each_on_its_own(tmp_path: Path) -> None:
    options = ("--group-size", "2", "--repeat", "2", "--concurrency", "1", "--resume", "kept")
    with in_this_process(tmp_path) as proxy:
        for ran in ("xxxx", "xxxxxx", "xxxxxx"):
            ok(run(proxy, *options, agent=REWARDS_EVERY_OTHER))
            assert (tmp_path / "seen.txt").read_text() == ran
        rewarded = [name for name, reward in facts(proxy, "rollout_id", "reward") if reward]
        groups = {tuple(one["rollout_id"] for one in proxy.get(f"/rollouts/{r}/rows")["group"]) for r in rewarded}
        assert sorted(len({*group} & {*rewarded}) for group in groups) == [2, 2]


def test_a_resumed_run_begins_no_rollout_anew_that_awaits_its_reward(tmp_path: Path) -> None:
    (tmp_path / "scoring.py").write_text("import time\ndef reward(rollout):\n    time.sleep(600)\n")
    with in_this_process(tmp_path, rewards={"function": f"{tmp_path}/scoring.py:reward"}) as proxy:
        (one,) = proxy.post("/rollouts", {"task_id": "a"}).json
        proxy.chat(one["rollout_id"])
        proxy.post(f"/rollouts/{one['rollout_id']}/end", {"status": "completed"})
        assert facts(proxy, "awaits_reward") == [[True]]
        (tmp_path / "kept").write_text(f"rollout {one['rollout_id']} of the group of {one['rollout_id']}\n")
        found = ok(run(proxy, "--group-size", "1", "--resume", "kept", "--json", agent="raise SystemExit(1)")).json
        assert (found["rollouts"], found["failed"], found["without_reward"]) == (1, 0, 1)


# --ahead

GROUP = 4
TAKEN: Json = {"step": 1, "version": None, "metrics": {}}
PUBLISHED = TAKEN | {"version": 1}


class StillWaiting(Exception):
    """It has looked, and looks again."""


class PlayedApi:
    """What the control API tells of the policy and of rollouts, which have ended well unless they say otherwise."""

    def __init__(self, *rollouts: Json, **policy: Any) -> None:
        ended = {"status": "completed", "reward": 1.0, "step": None, "dropped": None, "dropped_by": None}
        self.rollouts = [ended | one for one in rollouts]
        self.told = {"collapse": None, "test": None, "last_step": None} | policy
        self.looks = 0

    async def policy(self) -> Json:
        self.looks += 1
        if self.looks == 2:
            raise StillWaiting
        return self.told

    async def every_rollout(self, _: int, *, mode: str) -> AsyncIterator[Json]:
        assert mode == "train"
        for one in self.rollouts:
            yield one


@pytest.mark.parametrize(
    ("rollout", "policy", "waits"),
    [
        ({}, {}, True),
        ({"reward": None, "awaits_reward": True}, {}, True),
        ({"reward": None}, {}, False),
        ({"status": "failed"}, {}, False),
        ({"step": 1}, {"last_step": TAKEN}, True),
        ({"step": 1}, {"last_step": PUBLISHED}, False),
        ({"step": 1}, {"last_step": TAKEN | {"metrics": {"skipped": 1.0}}}, False),
        ({"step": 1}, {"last_step": TAKEN, "promotion": "gated"}, False),
        ({"dropped": "too old"}, {}, False),
        ({"dropped": "equal", "dropped_by": 1}, {"last_step": TAKEN}, True),
        ({"dropped": "equal", "dropped_by": 1}, {"last_step": PUBLISHED}, False),
        ({"rollout_id": "another's"}, {}, False),  # this one was deleted
        ({}, {"test": {}}, False),
    ],
)
async def test_a_rollout_is_waited_for_that_the_live_weights_are_still_to_learn_from(
    monkeypatch: pytest.MonkeyPatch, rollout: Json, policy: Json, waits: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_proxy.commands.run.limits.PATIENCE_S", 0.0)
    api: Any = PlayedApi({"rollout_id": "r"} | rollout, {"rollout_id": "older"}, **policy)
    backlog = Backlog(api, 1, 1, said.append)
    backlog.opened(["r"])
    backlog.ended({"rollout_id": "r"})
    if waits:
        with pytest.raises(StillWaiting):
            await backlog.wait()
    else:
        assert await backlog.wait()
    assert said == ["waiting for the trainer: 1 rollouts are not yet in the live weights"] * waits


async def test_as_many_groups_are_opened_as_there_is_room_for_and_one_however_large() -> None:
    api: Any = PlayedApi()
    assert await Backlog(api, 1, GROUP).wait()
    backlog = Backlog(api, 3 * GROUP + 1, GROUP)
    for group in range(3):
        assert await backlog.wait()
        backlog.opened([f"r{group}-{i}" for i in range(GROUP)])
    with pytest.raises(StillWaiting):
        await backlog.wait()


async def test_a_collapse_ends_the_wait_and_says_why() -> None:
    api: Any = PlayedApi(collapse=asdict(Collapse("reward", "fell by half", time.time(), time.time(), 0)))
    backlog = Backlog(api, 1, 1)
    backlog.opened(["r"])
    with pytest.raises(PolicyCollapsed, match="fell by half"):
        await backlog.wait()
