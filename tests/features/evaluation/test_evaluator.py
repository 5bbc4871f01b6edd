"""Evaluations beside training: which are owed, what they leave, whom they wait for; a real proxy and `eval`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.errors import ConfigError, StoreUnavailable
from lightning_proxy.features.evaluation import evaluator
from lightning_proxy.features.evaluation.evaluations import Evaluations
from lightning_proxy.features.evaluation.evaluator import Evaluator, Pace
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.plugins import Run, TrainerCore, check
from lightning_proxy.trainer.waiting import Stopped, all_of

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


class Evaluating:
    """A proxy with its store, and what `train` would start beside the steps."""

    def __init__(self, system: Any, store: Store, directory: Path) -> None:
        self.system, self.store, self.directory = system, store, directory
        self.evaluations = Evaluations(store)
        self.reported: list[dict[str, float]] = []

    def evaluator(self, mode: str = "lora", every_steps: int = 10, samples: int = 1, **more: Any) -> Evaluator:
        """The trainer's, after a start."""
        file, agent, tasks = (self.directory / name for name in ("system.yaml", "agent.py", "held_out.jsonl"))
        agent.write_text(AGENT)
        tasks.write_text("\n".join(json.dumps({"task_id": f"t{x}", "x": x / 4}) for x in range(4)))
        command = [sys.executable, str(agent), *more.pop("options", ())]
        section = {"tasks": str(tasks), "command": command, "every_steps": every_steps, "samples": samples, **more}
        settings = self.system.config.model_dump(mode="json")
        settings["proxy"]["port"] = int(self.system.url.rsplit(":", 1)[1])
        settings["evaluation"] = section
        settings["policy"]["directory"] = str(self.directory)
        file.write_text(json.dumps(settings))
        engine: Any = SimpleNamespace(trackers=SimpleNamespace(report=self.reported.append))
        swap: Any = SimpleNamespace(mode=mode)
        return Evaluator(TrainerCore(load_config(file), self.store, engine, Run(), swap))

    async def done(self, beside: Evaluator) -> None:
        """Let it do what is owed, as at the end of a run."""
        await all_of([beside.run(), beside.finish(asyncio.Event())])

    async def rollouts(self) -> list[dict[str, Any]]:
        _, page = await self.system.call("GET", "/rollouts?limit=1000")
        return list(page["data"])


@asynccontextmanager
async def evaluating(running: Running, directory: Path) -> AsyncIterator[Evaluating]:
    async with running(directory, publish="lora") as system, system.store() as store:
        yield Evaluating(system, store, directory)


async def test_a_version_is_evaluated_once_and_its_rollouts_are_never_trained_on(
    running: Running, tmp_path: Path
) -> None:
    async with evaluating(running, tmp_path) as e:
        await e.done(e.evaluator(samples=2))
        found = await e.evaluations.of(0)
        assert found is not None and found.ended_at is not None
        assert (found.reward, found.tasks, found.rollouts, found.failed) == (0.375, 4, 8, 0)
        assert found.low is not None and found.high is not None and found.low < 0.375 < found.high
        assert found.difference is None
        rollouts = await e.rollouts()
        assert {(one["mode"], one["policy_version"]) for one in rollouts} == {("eval", 0)}
        _, policy = await e.system.call("GET", "/policy")
        assert (policy["best"]["version"], policy["best"]["judged"]) == (0, "evaluation")
        assert e.reported == [{"eval_reward": 0.375, "eval_low": found.low, "eval_high": found.high, "eval_step": 0}]
        async with e.system.session.get(e.system.url + "/metrics") as answer:
            shown = await answer.text()
        assert "lightning_best_version 0.0" in shown and 'lightning_evaluation{metric="reward"} 0.375' in shown
        await e.done(e.evaluator())
        assert len(await e.rollouts()) == len(rollouts), "once"
        version = await e.system.earlier_version(e.store, tmp_path)
        assert (await e.system.call("POST", "/policy/promote", {"version": version}))[0] == 200
        assert await e.evaluator(every_steps=2).owed() is None
        await e.done(e.evaluator(every_steps=1))
        later = await e.evaluations.of(version)
        assert later is not None and (later.step, later.difference) == (1, 0.0)
        assert (await e.evaluations.best()) is not None and policy["best"]["version"] == 0, "the oldest of equals"


async def test_a_command_that_fails_is_told_in_a_line_and_not_tried_again(
    running: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", " of the trainer")
    async with evaluating(running, tmp_path) as e:
        beside = e.evaluator(options=["--fail"])
        await e.done(beside)
        found = await e.evaluations.of(0)
        assert found is not None and found.error is not None and found.reward is None
        assert found.error.endswith("every program failed, the first with exit code 1: no such tool"), found.error
        assert "\n" not in found.error and await beside.owed() is None and await e.evaluations.best() is None
        assert [found.error in record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        await beside.before_publishing(asyncio.Event())


async def test_a_command_that_hangs_is_ended_in_time_and_holds_nothing_up_for_longer(
    running: Running, tmp_path: Path
) -> None:
    pids, stop = tmp_path / "pids", asyncio.Event()
    async with evaluating(running, tmp_path) as e:
        merged = e.evaluator("merged", options=["--hang", str(pids)], timeout_s=3)
        working = asyncio.create_task(merged.run())
        while await e.evaluations.of(0) is None:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            await merged.before_publishing(stop)
        found = await e.evaluations.of(0)
        assert found is not None and found.error == "it was not done after 3 s (evaluation.timeout_s)"
        assert {one["status"] for one in await e.rollouts()} == {"discarded"}
        left = pids.read_text().split()
        assert left and not [pid for pid in left if Path("/proc", pid).exists()]
        await merged.finish(stop)
        await working


async def test_a_fault_of_an_evaluation_ends_no_training(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> Any:
        raise OSError("no space left on device")

    async with evaluating(running, tmp_path) as e:
        monkeypatch.setattr("lightning_proxy.commands.run.runner.LocalRunner._request", fault)
        await e.done(e.evaluator())
        found = await e.evaluations.of(0)
        assert found is not None and found.error is not None and "no space left on device" in found.error


async def test_what_a_killed_trainer_left_running_keeps_no_version_from_being_the_best(
    running: Running, tmp_path: Path
) -> None:
    async with evaluating(running, tmp_path) as e:
        await e.evaluations.begin(0, 0)
        await e.system.call("POST", "/rollouts", {"task_id": "t0", "mode": "eval", "policy_version": 0})
        assert await e.evaluations.under_way() == {0}
        await e.done(e.evaluator())
        assert await e.evaluations.under_way() == set()
        assert (await e.system.call("GET", "/policy"))[1]["best"]["version"] == 0
        await e.system.call("POST", "/rollouts", {"task_id": "t0", "mode": "eval", "policy_version": 0})
        assert await e.evaluations.under_way() == {0}, "by `eval`"


async def test_what_was_broken_off_is_owed_while_its_version_is_live(running: Running, tmp_path: Path) -> None:
    async with evaluating(running, tmp_path) as e:
        beside = e.evaluator()
        working = asyncio.create_task(beside.run())
        while await e.evaluations.of(0) is None:
            await asyncio.sleep(0.01)
        working.cancel()  # as the trainer is stopped
        await asyncio.gather(working, return_exceptions=True)
        owed = await e.evaluator().owed()
        assert owed is not None and owed.version == 0
        assert {one["status"] for one in await e.rollouts()} <= {"discarded", "completed"}
        await e.done(e.evaluator())
        found = await e.evaluations.of(0)
        assert found is not None and found.reward == 0.375
        await e.evaluations.begin(7, 70)
        working = asyncio.create_task(e.evaluator().run())
        async with asyncio.timeout(30):
            while await e.evaluations.of(7) is not None:  # another version is live
                await asyncio.sleep(0.01)
        working.cancel()


async def test_a_store_that_is_away_at_the_start_and_at_the_end_is_waited_for(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with evaluating(running, tmp_path) as e:
        beside, away = e.evaluator(), iter([True, False, False, True])

        def at_times(whole: Callable[..., Any]) -> Callable[..., Any]:
            async def asked(*args: Any) -> Any:
                if next(away, False):
                    raise StoreUnavailable("the store is away")
                return await whole(*args)

            return asked

        monkeypatch.setattr(beside, "owed", at_times(beside.owed))
        monkeypatch.setattr(beside.evaluations, "forget_broken_off", at_times(beside.evaluations.forget_broken_off))
        await e.done(beside)
        found = await e.evaluations.of(0)
        assert found is not None and found.reward == 0.375


async def test_tasks_that_are_not_text_end_no_training(running: Running, tmp_path: Path) -> None:
    async with evaluating(running, tmp_path) as e:
        beside = e.evaluator()
        (tmp_path / "held_out.jsonl").write_bytes(b'{"x": "\xff"}\n')
        await e.done(beside)
        found = await e.evaluations.of(0)
        assert found is not None and found.error is not None and "UTF-8" in found.error


async def test_merged_weights_are_replaced_once_they_are_evaluated(running: Running, tmp_path: Path) -> None:
    async with evaluating(running, tmp_path) as e:
        stop, merged = asyncio.Event(), e.evaluator("merged")
        await e.evaluator("lora").before_publishing(stop)
        await merged.before_publishing(stop)  # by a run of fine-tuning, beside which nothing is evaluated
        working = asyncio.create_task(merged.run())
        while await e.evaluations.of(0) is None:
            await asyncio.sleep(0.01)
        stop.set()
        with pytest.raises(Stopped):
            await merged.before_publishing(stop)
        stop.clear()
        await merged.before_publishing(stop)
        found = await e.evaluations.of(0)
        assert found is not None and found.ended_at is not None
        await merged.finish(stop)
        await working


async def test_rollouts_wait_while_agents_work_but_not_for_ever(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "LOOK_S", 0.01)
    async with evaluating(running, tmp_path) as e:
        await e.system.chat("agent")
        pace = Pace(e.evaluations, 10_000.0, 10)
        await pace.wait()  # the first one begins at once
        waiting = asyncio.create_task(pace.wait())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await e.store.rollouts.end("agent", "completed", None)
        await waiting
        assert not await e.evaluations.agents_work(0.0)
        await e.system.chat("another")
        soon = Pace(e.evaluations, 0.2, 2)  # the last of them begins after half of the time at most
        async with asyncio.timeout(10):
            await asyncio.gather(soon.wait(), soon.wait())


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
