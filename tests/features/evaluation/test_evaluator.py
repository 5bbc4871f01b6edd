"""Evaluations between steps: which are due, and what they leave; a real proxy and `eval`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, PublishError
from lightning_proxy.features.evaluation.evaluations import Evaluations, HeldOut
from lightning_proxy.features.evaluation.evaluator import Evaluator
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.plugins import Run, TrainerCore, check

Running = Callable[..., AbstractAsyncContextManager[Any]]

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


async def verified() -> None:
    """The live version is verified."""


class Evaluating:
    """A proxy with its store, and what the trainer does between its steps."""

    def __init__(self, system: Any, store: Store, directory: Path) -> None:
        self.system, self.store, self.directory = system, store, directory
        self.evaluations = Evaluations(store)
        self.reported: list[dict[str, float]] = []

    def evaluator(self, every_steps: int = 10, samples: int = 1, **more: Any) -> Evaluator:
        """The trainer's, after a start."""
        file, agent, tasks = (self.directory / name for name in ("system.yaml", "agent.py", "held_out.jsonl"))
        agent.write_text(AGENT)
        tasks.write_text("\n".join(json.dumps({"task_id": f"t{x}", "x": x / 4}) for x in range(4)))
        command = [sys.executable, str(agent), *more.pop("options", ())]
        settings = self.system.config.model_dump(mode="json")
        settings["proxy"]["port"] = int(self.system.url.rsplit(":", 1)[1])
        settings["evaluation"] = {"tasks": str(tasks), "command": command, "every_steps": every_steps}
        settings["evaluation"] |= {"samples": samples, **more}
        settings["policy"]["directory"] = str(self.directory)
        file.write_text(json.dumps(settings))
        engine: Any = SimpleNamespace(trackers=SimpleNamespace(report=self.reported.append))
        return Evaluator(TrainerCore(load_config(file), self.store, engine, Run()))

    async def evaluated(self, evaluator: Evaluator, version: int = 0) -> HeldOut:
        """What an evaluation between two steps leaves."""
        await evaluator.evaluate(asyncio.Event(), verified)
        return (await self.evaluations.read())[version]

    async def rollouts(self) -> list[dict[str, Any]]:
        _, page = await self.system.call("GET", "/rollouts?limit=1000")
        return list(page["data"])


@pytest.fixture
async def e(running: Running, tmp_path: Path) -> AsyncIterator[Evaluating]:
    async with running(tmp_path, publish="lora") as system, system.store() as store:
        yield Evaluating(system, store, tmp_path)


async def test_a_version_is_verified_before_it_is_evaluated(e: Evaluating) -> None:
    async def differs() -> None:
        raise PublishError("it does not verify")

    evaluator = e.evaluator()
    with pytest.raises(PublishError):
        await evaluator.evaluate(asyncio.Event(), differs)
    assert (await e.rollouts(), await e.evaluations.read()) == ([], {})
    await evaluator.evaluate(asyncio.Event(), verified)
    await evaluator.evaluate(asyncio.Event(), differs)  # nothing is due: nothing is asked


async def test_a_version_is_evaluated_once_and_its_rollouts_are_never_trained_on(e: Evaluating) -> None:
    found = await e.evaluated(e.evaluator(samples=2))
    assert found.ended_at is not None and (found.reward, found.difference) == (0.375, None)
    assert found.low is not None and found.high is not None and found.low < 0.375 < found.high
    rollouts = await e.rollouts()
    assert [(one["mode"], one["policy_version"]) for one in rollouts] == [("eval", 0)] * 8
    _, policy = await e.system.call("GET", "/policy")
    assert (policy["best"]["version"], policy["best"]["judged"]) == (0, "evaluation")
    assert e.reported == [{"eval_reward": 0.375, "eval_low": found.low, "eval_high": found.high, "eval_step": 0}]
    async with e.system.session.get(e.system.url + "/metrics") as answer:
        shown = await answer.text()
    assert "lightning_best_version 0.0" in shown and 'lightning_evaluation{metric="reward"} 0.375' in shown
    await e.evaluated(e.evaluator())
    assert len(await e.rollouts()) == len(rollouts), "once"
    version = await e.system.earlier_version(e.store, e.directory)
    assert (await e.system.call("POST", "/policy/promote", {"version": version}))[0] == 200
    await e.evaluated(e.evaluator(every_steps=2))
    assert version not in await e.evaluations.read()
    later = await e.evaluated(e.evaluator(every_steps=1), version)
    assert (later.step, later.difference) == (1, 0.0)
    best = await e.evaluations.best()
    assert best is not None and best.version == 0, "the oldest of equals"


async def test_a_command_that_fails_is_told_in_a_line_and_not_tried_again(
    e: Evaluating, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", " of the trainer")
    evaluator = e.evaluator(options=["--fail"])
    found = await e.evaluated(evaluator)
    assert found.error is not None and found.reward is None and "\n" not in found.error
    assert found.error.endswith("every program failed, the first with exit code 1: no such tool"), found.error
    assert [found.error in record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert await e.evaluated(evaluator) == found and await e.evaluations.best() is None


async def test_a_command_that_hangs_is_ended_in_time(e: Evaluating) -> None:
    pids = e.directory / "pids"
    found = await e.evaluated(e.evaluator(options=["--hang", str(pids)], timeout_s=3))
    assert found.error == "it was not done after 3 s (evaluation.timeout_s)"
    assert {one["status"] for one in await e.rollouts()} == {"discarded"}
    left = pids.read_text().split()
    assert left and not [pid for pid in left if Path("/proc", pid).exists()]


async def test_what_is_wrong_with_the_tasks_or_this_machine_ends_no_training(
    e: Evaluating, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> Any:
        raise OSError("no space left on device")

    for said in ("UTF-8", "no space left on device"):
        evaluator = e.evaluator()
        if said == "UTF-8":
            (e.directory / "held_out.jsonl").write_bytes(b'{"x": "\xff"}\n')
        else:
            monkeypatch.setattr("lightning_proxy.commands.run.runner.LocalRunner._request", fault)
        await e.store.database.execute("DELETE FROM evaluations")
        assert said in str((await e.evaluated(evaluator)).error)


async def test_what_was_broken_off_is_begun_again_and_keeps_no_version_from_being_the_best(e: Evaluating) -> None:
    stop = asyncio.Event()
    working = asyncio.create_task(e.evaluator(options=["--hang", str(e.directory / "pids")]).evaluate(stop, verified))
    while not (e.directory / "pids").exists():
        await asyncio.sleep(0.01)
    stop.set()
    await working
    assert {one["status"] for one in await e.rollouts()} == {"discarded"}
    await e.system.call("POST", "/rollouts", {"task_id": "t0", "mode": "eval", "policy_version": 0})
    await e.evaluations.begin(7, 70)
    assert await e.evaluations.under_way() == {0, 7}
    await e.evaluations.forget_broken_off()  # as at a start
    assert (await e.evaluated(e.evaluator())).reward == 0.375
    assert await e.evaluations.under_way() == set()
    assert (await e.system.call("GET", "/policy"))[1]["best"]["version"] == 0
    await e.system.call("POST", "/rollouts", {"task_id": "t0", "mode": "eval", "policy_version": 0})
    assert await e.evaluations.under_way() == {0}, "by `eval`"


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("no-such-program x", "evaluation.command: there is no program 'no-such-program' to start"),
        ("python nowhere.py", "evaluation.command: there is no file 'nowhere.py' for python to run"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused_at_the_start(tmp_path: Path, command: str, wrong: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    section = {"tasks": str(tasks), "command": command}
    config = Config.model_validate({"evaluation": section})
    with pytest.raises(ConfigError, match="evaluation.tasks: there is no file"):
        check(config, Run())
    tasks.write_text("{}")
    with pytest.raises(ConfigError, match=wrong.replace(".", r"\.")):
        check(config, Run())
    check(config, Run("sft"))


@pytest.mark.parametrize("section", [{"tasks": "t.jsonl"}, {"command": "python agent.py"}])
def test_tasks_and_a_command_go_together(section: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="evaluation needs both"):
        Config.model_validate({"evaluation": section})
