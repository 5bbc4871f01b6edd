"""The `run` command against a real proxy: how many rollouts it opens and what a person sees meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_proxy.commands.run.command import problem
from lightning_proxy.commands.run.report import ProgressView
from lightning_proxy.commands.run.run import RolloutResult
from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.store.waiting import EQUAL_REWARDS
from support.judging import judging, ordered
from support.sections import TrainerConfig

Running = Callable[..., AbstractAsyncContextManager[Any]]


CALLS = """
import json, os, urllib.request
body = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}]}
headers = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""

REWARDS = """
import json, os, urllib.request
body = json.dumps({"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": 1}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["LIGHTNING_URL"] + "/reward", body, headers))
"""


async def test_programs_that_end_complete_their_rollouts_and_siblings_may_wait_for_each_others_judge(
    running: Running, tmp_path: Path
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


async def test_a_run_is_no_further_ahead_of_the_policy_than_it_may_be(running: Running, tmp_path: Path) -> None:
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


async def test_that_nothing_is_learned_is_said_at_the_end_and_in_status(running: Running, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("trainer", "size", "passes", "waiting", "told"),
    [
        ({}, 1, 1, 0, "no step will be taken"),
        ({"lone_rollouts": "running"}, 1, 1, 0, None),
        ({"compare": "step"}, 1, 1, 0, None),
        ({"group_size": 2, "tasks_per_step": 2}, 1, 2, 0, None),
        ({"group_size": 4}, 1, 2, 0, "a task gets 2 rollouts"),
        ({}, 8, 3, 0, "a step takes 8 groups (trainer.tasks_per_step), and 6 of 8 missing ones come"),
        ({}, 8, 3, 15, "a step takes 8 groups (trainer.tasks_per_step), and 6 of 7 missing ones come"),
        ({}, 8, 3, 16, None),
        ({}, 8, 4, 0, None),
        ({"tasks_per_step": 2}, 8, 1, 0, None),
        ({"group_size": 4}, 1, 4, 0, "a step takes 8 groups (trainer.tasks_per_step), and 2 of 8 missing ones come"),
        ({"schedule": {"when": "rollouts"}}, 8, 1, 0, None),
    ],
)
def test_rollouts_are_judged_by_what_the_trainer_compares_and_a_step_takes(
    trainer: dict[str, Any], size: int, passes: int, waiting: int, told: str | None
) -> None:
    tasks = [Task("t1", "{}"), Task("t2", "{}")] * passes
    said = problem(TrainerConfig.model_validate(trainer), tasks, size, waiting)
    assert (said or "").startswith(told or "") and (said is None) == (told is None)


def result(reward: float | None, exit_code: int = 0) -> RolloutResult:
    return RolloutResult("r", "t", exit_code, None, reward)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_elsewhere_than_on_a_terminal_progress_is_a_line_at_the_end() -> None:
    console = Console(file=StringIO(), width=80)
    with ProgressView(console) as view:
        bar = view.bar("rollouts", 2)
        bar.add(result(None))
        bar.add(result(0.5, 1))
    assert shown(console) == "rollouts 2/2  reward 0.500  failed 1  0:00:00\n"


REWARDS_EVERY_OTHER = """
import json, os, pathlib, urllib.request
seen = pathlib.Path('seen.txt')
seen.write_text((seen.read_text() if seen.exists() else '') + 'x')
assert len(seen.read_text()) not in (2, 4)
body = {'rollout_id': os.environ['LIGHTNING_ROLLOUT_ID'], 'reward': 1}
headers = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
url = os.environ['LIGHTNING_URL'] + '/reward'
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


async def test_groups_of_one_task_are_resumed_each_on_its_own(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


async def test_a_resumed_run_begins_no_rollout_anew_that_awaits_its_reward(running: Running, tmp_path: Path) -> None:
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


async def test_a_reward_function_that_always_fails_is_told_at_the_end_of_a_run(
    running: Running, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t1"}\n')
    (tmp_path / "scoring.py").write_text("def reward(rollout):\n    raise ValueError('no')\n")
    async with running(tmp_path, rewards={"function": f"{tmp_path}/scoring.py:reward"}) as system:
        asked = ("--tasks", tmp_path / "tasks.jsonl", "--group-size", "2", "--", "true")
        code, _, err = await system.lightning("run", *asked)
    assert code == 0
    assert "2 completed rollouts of the newest 200 have no reward, so no step takes them" in " ".join(err.split()), err
