"""Evaluations between steps: which are due, and what they leave; a real proxy and `eval`. The best version's files."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from lightning_proxy.core.config.file import config_of, load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, PublishError
from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.features.evaluation.evaluations import Evaluations
from lightning_proxy.features.evaluation.evaluator import Evaluator
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.plugins import Run, TrainerCore, check
from lightning_proxy.trainer.train import train
from support.training import bench

# The reward is that of the task.
AGENT = """
import json, os, sys, time, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)

if "--hang" in sys.argv:
    with open(sys.argv[-1], "a") as file:
        print(os.getpid(), file=file, flush=True)
    time.sleep(600)
if "--fail" in sys.argv:
    sys.exit("no such tool" + os.environ.get("WANDB_RUN_ID", ""))
asked = {"model": "policy", "messages": [{"role": "user", "content": "who are you?"}]}
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked)
reward = json.loads(os.environ["LIGHTNING_TASK"])["x"]
post(os.environ["LIGHTNING_URL"] + "/reward", {"rollout_id": os.environ["LIGHTNING_ROLLOUT_ID"], "reward": reward})
"""


class Evaluating:
    """A proxy with its store, and what the trainer does between its steps."""

    def __init__(self, system: Any, store: Store) -> None:
        self.system, self.store, self.directory = system, store, system.vllm.root
        self.evaluations, self.reported = Evaluations(store), list[dict[str, float]]()

    def evaluator(self, *options: str, **more: Any) -> Evaluator:
        """The trainer's, after a start. `options`: of the agent."""
        agent, tasks = self.directory / "agent.py", self.directory / "held_out.jsonl"
        agent.write_text(AGENT)
        tasks.write_text("\n".join(json.dumps({"task_id": f"t{x}", "x": x / 4}) for x in range(4)))
        command = [sys.executable, str(agent), *options]
        section = {"tasks": str(tasks), "command": command, "every_steps": 10, "samples": 1, **more}
        config = load_config(self.directory / "system.yaml", {"evaluation": section})
        engine: Any = SimpleNamespace(trackers=SimpleNamespace(report=self.reported.append))
        return Evaluator(TrainerCore(config, self.store, engine, Run()))

    async def evaluated(self, evaluator: Evaluator, version: int = 0) -> Any:
        """What an evaluation between two steps leaves."""
        await evaluator.evaluate(asyncio.Event(), AsyncMock())
        return (await self.evaluations.read())[version]

    async def rollouts(self) -> Any:
        return (await self.system.get("/rollouts?limit=1000"))["data"]

    async def best(self) -> Any:
        return (await self.system.get("/policy"))["best"]


@pytest.fixture
async def e(start: Any) -> AsyncIterator[Evaluating]:
    async with start(publish="lora") as system, system.store() as store:
        await system.lightning("status")  # writes the configuration
        yield Evaluating(system, store)


async def test_a_version_is_verified_before_it_is_evaluated(e: Evaluating) -> None:
    evaluator, differs = e.evaluator(), AsyncMock(side_effect=PublishError("it does not verify"))
    with pytest.raises(PublishError):
        await evaluator.evaluate(asyncio.Event(), differs)
    assert (await e.rollouts(), await e.evaluations.read()) == ([], {})
    await evaluator.evaluate(asyncio.Event(), AsyncMock())
    await evaluator.evaluate(asyncio.Event(), differs)  # nothing is due: nothing is asked


async def test_a_version_is_evaluated_once_and_its_rollouts_are_never_trained_on(e: Evaluating) -> None:
    found = await e.evaluated(e.evaluator(samples=2))
    assert found.low < found.reward == 0.375 < found.high and found.difference is None and found.ended_at
    rollouts = await e.rollouts()
    assert [(one["mode"], one["policy_version"]) for one in rollouts] == [("eval", 0)] * 8
    assert e.reported == [{"eval_reward": 0.375, "eval_low": found.low, "eval_high": found.high, "eval_step": 0}]
    async with e.system.session.get(e.system.url + "/metrics") as answer:
        shown = await answer.text()
    assert "lightning_best_version 0.0" in shown and 'lightning_evaluation{metric="reward"} 0.375' in shown
    await e.evaluated(e.evaluator())
    assert len(await e.rollouts()) == len(rollouts), "once"
    version = await e.system.earlier_version(e.store, e.directory)
    await e.system.post("/policy/promote", {"version": version})
    await e.evaluated(e.evaluator(every_steps=2))
    assert version not in await e.evaluations.read()
    later = await e.evaluated(e.evaluator(every_steps=1), version)
    assert (later.step, later.difference) == (1, 0.0)
    assert (await e.best())["version"] == 0, "the oldest of equals"


async def test_a_command_that_fails_is_told_in_a_line_and_not_tried_again(
    e: Evaluating, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", " of the trainer")
    evaluator = e.evaluator("--fail")
    found = await e.evaluated(evaluator)
    assert found.reward is None and "\n" not in found.error
    assert found.error.endswith("every program failed; first failure: exit code 1: no such tool"), found.error
    assert [found.error in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]
    assert (await e.evaluated(evaluator), await e.best()) == (found, None)


async def test_a_command_that_hangs_is_ended_in_time(e: Evaluating) -> None:
    pids = e.directory / "pids"
    found = await e.evaluated(e.evaluator("--hang", str(pids), timeout_s=3))
    assert found.error == "the tasks were not done within 3 s (evaluation.timeout_s)"
    assert {one["status"] for one in await e.rollouts()} == {"discarded"}
    (left,) = {Path("/proc", pid).exists() for pid in pids.read_text().split()}
    assert not left


@pytest.mark.parametrize("wrong", ["UTF-8", "no space left on device"])
async def test_what_is_wrong_with_the_tasks_or_this_machine_ends_no_training(
    e: Evaluating, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    evaluator = e.evaluator()
    if wrong == "UTF-8":
        (e.directory / "held_out.jsonl").write_bytes(b'{"x": "\xff"}\n')
    else:
        fault = Mock(side_effect=OSError(wrong))
        monkeypatch.setattr("lightning_proxy.commands.run.runner.LocalRunner._request", fault)
    assert wrong in str((await e.evaluated(evaluator)).error)


async def test_what_was_broken_off_is_begun_again_and_keeps_no_version_from_being_the_best(e: Evaluating) -> None:
    stop = asyncio.Event()
    working = asyncio.create_task(e.evaluator("--hang", str(e.directory / "pids")).evaluate(stop, AsyncMock()))
    while not (e.directory / "pids").exists():
        await asyncio.sleep(0.01)
    stop.set()
    await working
    assert {one["status"] for one in await e.rollouts()} == {"discarded"}
    await e.system.post("/rollouts", {"task_id": "t0", "mode": "eval", "policy_version": 0})
    await e.evaluations.begin(7, 70)
    assert await e.evaluations.under_way() == {0, 7}
    await e.evaluations.forget_broken_off()  # as at a start
    assert (await e.evaluated(e.evaluator())).reward == 0.375
    assert await e.evaluations.under_way() == set()
    assert (await e.best())["version"] == 0


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ({"tasks": "tasks.jsonl", "command": "no-such-program x"}, "there is no program 'no-such-program' to start"),
        ({"tasks": "tasks.jsonl", "command": "python nowhere.py"}, "there is no file 'nowhere.py' for python to run"),
        ({"tasks": "nowhere.jsonl", "command": "true"}, "evaluation.tasks: there is no file"),
        ({"tasks": "tasks.jsonl"}, "evaluation needs both"),
        ({"command": "true"}, "evaluation needs both"),
    ],
)
def test_what_cannot_be_started_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: Any, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=wrong):
        check(config_of({"evaluation": section}), Run())
    if len(section) == 2:  # only `train` evaluates
        check(config_of({"evaluation": section}), Run("sft"))


async def test_versions_are_evaluated_between_steps_and_the_files_of_the_best_stay(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: Evaluator, version: int) -> Any:
        assert all("publish_s" in step.metrics for step in await b.store.steps.all()), "no step is under way"
        return {"reward": 0.5, "low": 0.4, "high": 0.6}

    caplog.set_level("INFO")
    (tmp_path / "tasks.jsonl").write_text("{}")
    monkeypatch.setattr(Evaluator, "_run", run)
    async with bench(base, tmp_path, "lora", collapse={"action": "off"}) as b:
        section = {"tasks": str(tmp_path / "tasks.jsonl"), "command": "true", "every_steps": 2}
        config = Config.model_validate(b.config.model_dump() | {"evaluation": section})
        for n in range(8):
            for i in range(4):
                await b.rollout(f"t{n}", 0.1 * n + i / 20, version=n)
            await train(config, asyncio.Event(), Run(once=True))
            if n == 1:  # `lightning-proxy eval --models 1`
                await b.store.rollouts.open([(RolloutName("held-out", "h", mode="eval"), "x")], {}, policy_version=1)
            if n == 5:  # for so long it is evaluated, and its files stay
                await b.store.rewards.post([Reward("held-out", 1.0)])
        assert [*await Evaluations(b.store).read()] == [0, 2, 4, 6, 8]
        assert {version.version for version in await b.store.versions.with_files()} == {1, 6, 7, 8}
    assert "the best is version 1: held-out reward 1.000" in caplog.text
