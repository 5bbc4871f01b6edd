"""The `run` command against a real proxy: how many rollouts it opens and what a person sees meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_proxy.commands.run.group_size import too_few, too_small
from lightning_proxy.commands.run.progress import ProgressView
from lightning_proxy.commands.run.resume import kept_results
from lightning_proxy.commands.run.run import RolloutResult
from lightning_proxy.commands.run.tasks import Task
from lightning_proxy.proxy.errors import ConfigError
from lightning_proxy.proxy.store.waiting import EQUAL_REWARDS
from lightning_proxy.proxy.types import Reward, RolloutName
from support.judging import judging, ordered
from support.sections import TrainerConfig

Running = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize(("options", "opened"), [([], 8), (["--group-size", "3"], 3), (["--mode", "eval"], 1)], ids=str)
async def test_a_task_has_as_many_siblings_as_the_trainer_compares(
    running: Running, tmp_path: Path, options: list[str], opened: int
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t1"}\n')
    async with running(tmp_path) as system:
        assert system.config.trainer.group_size == 8
        code, out, err = await system.lightning("run", "--tasks", tasks, "--json", *options, "--", "true")
    assert (code, json.loads(out)["rollouts"]) == (0, opened), err


CALLS = """
import json, os, urllib.request
body = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}]}
headers = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""


async def test_siblings_that_wait_for_each_others_judge_need_not_run_at_once(running: Running, tmp_path: Path) -> None:
    tasks, agent = tmp_path / "tasks.jsonl", tmp_path / "agent.py"
    tasks.write_text('{"task_id": "t1"}\n')
    agent.write_text(CALLS)
    async with judging(ordered(lambda text: 1.0)) as judge:
        use = {"kind": "rank", "model": "openai/m", "api_base": f"{judge.url}/v1"}
        async with running(tmp_path, rewards={"use": [use]}) as system:
            options = ("--tasks", tasks, "--group-size", "3", "--concurrency", "1", "--json")
            code, out, err = await system.lightning("run", *options, "--", sys.executable, agent)
            assert (code, json.loads(out)["mean_reward"], json.loads(out)["without_reward"]) == (0, 0.5, 0), err


async def test_runs_are_ended_and_rewarded_by_the_proxys_reward_function(running: Running, tmp_path: Path) -> None:
    tasks, agent, scoring = tmp_path / "tasks.jsonl", tmp_path / "agent.py", tmp_path / "scoring.py"
    tasks.write_text('{"task_id": "t1"}\n')
    agent.write_text(CALLS)
    scoring.write_text("def reward(rollout):\n    return 0.5 if rollout['calls'] else None\n")
    async with running(tmp_path, rewards={"function": f"{scoring}:reward"}) as system:
        options = ("--tasks", tasks, "--group-size", "2", "--json")
        code, out, err = await system.lightning("run", *options, "--", sys.executable, agent)
        assert (code, json.loads(out)["mean_reward"], json.loads(out)["without_reward"]) == (0, 0.5, 0), err
        _, page = await system.call("GET", "/rollouts")
        assert [(r["status"], r["reason"]) for r in page["data"]] == [("completed", "the program ended")] * 2


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


async def test_rollouts_without_a_call_are_told_of_and_groups_that_make_no_step(
    running: Running, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t1"}\n{"task_id": "t2"}\n')
    async with running(tmp_path) as system:
        told = {}
        for size in ("1", "4", "8"):
            _, _, err = await system.lightning("run", "--tasks", tasks, "--group-size", size, "--", "true")
            told[size] = " ".join(err.split())
        options = ("--mode", "eval", "--json")
        _, out, err = await system.lightning("run", "--tasks", tasks, *options, "--", "no-such-program")
    assert "no step will be taken" in told["1"]
    assert "2 groups come of this, and a step takes 8 (trainer.tasks_per_step)" in told["4"]
    assert "it waits 10m for them; add tasks, or --repeat 4" in told["4"]
    assert "2 of 2 rollouts made no call: does your agent read OPENAI_BASE_URL?" in told["1"]
    assert "trainer.group_size" not in told["8"]
    assert (out, "no-such-program" in err) == ("", True)


@pytest.mark.parametrize(
    ("trainer", "size", "passes", "told"),
    [
        ({}, 1, 1, "no step will be taken"),
        ({"lone_rollouts": "running"}, 1, 1, None),
        ({"baseline": "reinforce_pp"}, 1, 1, None),
        ({}, 4, 1, None),
        ({"group_size": 2}, 1, 2, None),
        ({"group_size": 4}, 1, 2, "a task gets 2 rollouts"),
    ],
)
def test_a_group_size_is_judged_by_what_the_trainer_compares(
    trainer: dict[str, Any], size: int, passes: int, told: str | None
) -> None:
    tasks = [Task("t1", "{}"), Task("t2", "{}")] * passes
    found = too_small(TrainerConfig.model_validate(trainer), tasks, size)
    assert (found or "").startswith(told or "") and (found is None) == (told is None)


@pytest.mark.parametrize(
    ("trainer", "size", "passes", "waiting", "told"),
    [
        ({}, 8, 3, 0, "6 groups come of this, and a step takes 8"),
        ({}, 8, 3, 15, "6 groups come of this, 1 wait, and a step takes 8"),
        ({}, 8, 3, 16, None),
        ({}, 8, 4, 0, None),
        ({"tasks_per_step": 2}, 8, 1, 0, None),
        ({"group_size": 4}, 1, 4, 0, "2 groups come of this"),
        ({"lone_rollouts": "running"}, 1, 1, 0, None),
        ({"schedule": {"when": "rollouts"}}, 8, 1, 0, None),
    ],
)
def test_the_number_of_groups_is_judged_by_what_a_step_takes(
    trainer: dict[str, Any], size: int, passes: int, waiting: int, told: str | None
) -> None:
    tasks = [Task("t1", "{}"), Task("t2", "{}")] * passes
    found = too_few(TrainerConfig.model_validate(trainer), tasks, size, waiting)
    assert (found or "").startswith(told or "") and (found is None) == (told is None)


async def test_rollouts_that_are_not_trained_on_wait_for_no_trainer(running: Running, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "t1"}\n')
    async with running(tmp_path) as system:
        options = ("--mode", "eval", "--ahead", "1")
        code, _, err = await system.lightning("run", "--tasks", tasks, *options, "--", "true")
    assert (code, "--ahead cannot be used with --mode eval" in err) == (2, True)


def result(reward: float | None, exit_code: int = 0) -> RolloutResult:
    return RolloutResult("r", "t", exit_code, None, reward)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_elsewhere_than_on_a_terminal_progress_is_a_line_now_and_then_and_one_at_the_end() -> None:
    console = Console(file=StringIO(), width=80)
    with ProgressView(console) as view:
        bar = view.bar("rollouts", 3)
        for one in (result(1.0), result(None, 1), result(0.5)):
            bar.add(one)
    assert shown(console) == "rollouts 3/3  reward 0.750  failed 1  0:00:00\n"


def test_a_bar_that_is_cut_short_says_how_far_it_came() -> None:
    console = Console(file=StringIO(), width=80)
    with ProgressView(console) as view:
        view.bar("rollouts", 3).add(result(None))
        view.bar("nothing yet", 3)
    assert shown(console) == "rollouts 1/3  reward -  failed 0  0:00:00\n"


def test_on_a_terminal_progress_is_a_bar_of_at_most_80_columns() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system=None)
    with ProgressView(console) as view:
        bar = view.bar("a-model-with-a-rather-long-name", 10_000)
        bar.add(result(1.0))
        bar.show(5_000, 0.123, 12)
    last = shown(console).rsplit("\r", 1)[-1]
    assert "5000/10000" in last and "reward 0.123" in last and "failed 12" in last
    assert max(map(len, last.splitlines())) <= 90  # with the characters that move the cursor


FAILS_AT_FIRST = """
import json, os, pathlib, urllib.request
task, seen = json.loads(os.environ['LIGHTNING_TASK'])['task_id'], pathlib.Path('seen.txt')
ran = seen.read_text().split() if seen.exists() else []
seen.write_text(' '.join([*ran, task]))
assert (task, ran.count(task)) not in (('a', 1), ('b', 0), ('b', 1))  # the second of a, both of b
root, rollout = os.environ['LIGHTNING_URL'], os.environ['LIGHTNING_ROLLOUT_ID']
body = [{'rollout_id': rollout, 'reward': value, 'name': name, 'final': name == 'reward'}
        for name, value in (('style', 0.5), ('reward', 1.0))]
headers = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
urllib.request.urlopen(urllib.request.Request(root + '/reward', json.dumps(body).encode(), headers)).read()
"""


async def test_a_run_that_is_resumed_asks_for_no_rollout_again_that_has_its_reward(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(FAILS_AT_FIRST)
    Path("tasks.jsonl").write_text("".join(f'{{"task_id": "{name}"}}\n' for name in "abc"))
    options = ("--tasks", "tasks.jsonl", "--group-size", "2", "--concurrency", "1", "--resume", "kept.jsonl", "--json")
    async with running(tmp_path) as system:
        for failed, ran in ((3, "a a b b c c"), (0, "a a b b c c a b b"), (0, "a a b b c c a b b")):
            code, out, err = await system.lightning("run", *options, "--", sys.executable, "agent.py")
            assert code == 0, err
            found = json.loads(out)
            assert (found["rollouts"], found["failed"], found["mean_reward"]) == (6, failed, 1.0)
            assert Path("seen.txt").read_text() == ran
            kept = Path("kept.jsonl")
            kept.write_text(kept.read_text() + '{"rollout_id": "cut o')
        assert found["by_name"] == {"style": {"mean": 0.5, "rollouts": 6}}
        async with system.store() as store:
            groups = await store.waiting.groups()
    assert [(group.task_id, group.completed) for group in groups] == [("a", 2), ("c", 2), ("b", 2)]


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
    assert [(group.task_id, group.completed) for group in groups] == [("a", 2), ("a", 2)]


def test_results_of_other_tasks_are_forgotten(tmp_path: Path) -> None:
    file, task = tmp_path / "kept", Task("a", "{}")
    opened = [{"rollout_id": name, "group": group} for name, group in (("1", "1"), ("2", "1"), ("3", "3"), ("z", "z"))]
    results = [asdict(RolloutResult(one["rollout_id"], "a", 0, None, 1.0)) | one for one in opened]
    results[3]["task_id"] = "gone"
    file.write_text("".join(json.dumps(one) + "\n" for one in [*opened, *results]))
    with kept_results(file) as kept:
        assert kept.left([task, task], 2) == [replace(task, siblings=("3",))]
        assert [result.rollout_id for result in kept.results] == ["1", "2", "3"]


COUNTS = """
import json, os
with open('seen.txt', 'a') as seen:
    seen.write(json.loads(os.environ['LIGHTNING_TASK'])['task_id'])
"""


async def test_a_run_that_is_resumed_counts_what_was_rewarded_after_the_earlier_one(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(COUNTS)
    Path("tasks.jsonl").write_text("".join(f'{{"task_id": "{name}"}}\n' for name in "abc"))
    options = ("--tasks", "tasks.jsonl", "--group-size", "1", "--resume", "kept.jsonl", "--json")
    async with running(tmp_path) as system:
        for before, ran, rewarded in (("", "abc", 0), ("ab", "abcc", 2), ("c", "abcc", 3)):
            for name in before:
                (newest, *_) = (await system.call("GET", f"/rollouts?task_id={name}"))[1]["data"]
                await system.call("POST", "/reward", {"rollout_id": newest["rollout_id"], "reward": 1})
            code, out, err = await system.lightning("run", *options, "--", sys.executable, "agent.py")
            assert code == 0, err
            found = json.loads(out)
            assert (found["rollouts"], 3 - found["without_reward"]) == (3, rewarded)
            assert "".join(sorted(Path("seen.txt").read_text())) == ran


@pytest.mark.parametrize("text", ['{"task_id": "a"}\n', '{"task_id": "a"}', "x\n"])
def test_a_file_that_has_no_results_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(text)
    with pytest.raises(ConfigError, match=r"tasks\.jsonl is no file of results"), kept_results(tasks):
        pass
    assert tasks.read_text() == text


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
