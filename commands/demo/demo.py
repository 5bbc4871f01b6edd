"""`demo`: the main loop on a small real model, run with the same commands that a user has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from ...core.config.file import load_config
from ...core.errors import LightningError
from ..api_client import ApiClient, ApiError
from ..eval.report import save
from ..export.policy import where
from ..run.backlog import POLL_S, Backlog, PolicyCollapsed
from ..run.journal import KILLED
from ..run.programs import LocalRunner
from ..run.progress import ProgressView
from ..run.run import RolloutResult, RunOptions, run_tasks
from ..run.runner import Runner
from ..run.summary import Totals, totals
from ..run.tasks import Task, read_tasks
from ..signals import run_until_signal
from ..system.steps import tell_why_it_stands
from ..system.system import Launch, System
from .config import AGENTS, EXAMPLE, GROUP_SIZE, TASKS_PER_STEP, DemoOptions, begin, resumed, write_config
from .model import cache_directory, require_packages
from .report import DemoResult, curve, save_png, show

CONCURRENCY = 64
# `import openai` loads most of itself in the first call: 0.6 s of CPU in every run, 0.03 s with these preloaded.
PRELOADED = ("openai", "openai.resources", "httpcore", "h11", "certifi", "urllib.request")
PERFECT_STEPS = 4
STEP_ROLLOUTS = GROUP_SIZE * TASKS_PER_STEP


def demo(options: DemoOptions, *, resume: bool = False) -> None:
    """Prepare model, tasks and configuration, run the loop, then show and save the result.

    `resume`: go on in a directory where a demo was stopped or killed, with that demo's options.
    """
    console = Console()
    require_packages()
    options = resumed(options.directory) if resume else begin(options)
    directory = options.directory
    tasks = directory / "tasks"
    subprocess.run([sys.executable, EXAMPLE / "tasks.py", tasks, f"--seed={options.seed}"], check=True)
    console.print("[dim]preparing the model[/]")
    # In a process of its own, so that the memory of torch and transformers is free before the loop starts.
    model = options.model or cache_directory()
    if not (model / "config.json").is_file():
        made = subprocess.run([sys.executable, "-m", "lightning_proxy.commands.demo.model", model], check=False)
        if made.returncode != 0:
            raise LightningError(f"the demo's model could not be made in {model}; see the error above")
    config = write_config(directory, model, options)
    work = Demo(options, directory, config, console)
    try:
        result = run_until_signal(work.run())
    except LightningError:
        lines = f"{work.reached()}\ngo on: lightning-proxy demo --resume --dir {directory}"
        console.print(lines, markup=False, highlight=False, soft_wrap=True)
        with contextlib.suppress(LightningError):  # the first error is the one to show
            _say_where(config, console)
        raise
    save(asdict(result), directory / "result.json")
    save_png(result, directory / "reward.png")
    show(result, console)
    _say_where(config, console)
    console.print(f"curve: {directory / 'reward.png'}, data: {directory / 'result.json'}", soft_wrap=True)


def _say_where(config: Path, console: Console) -> None:
    """Say where the trained weights are, if there are any."""
    if (place := asyncio.run(where(load_config(config), f"--config {config} "))) is not None:
        console.print(place, markup=False, highlight=False, soft_wrap=True)


class Demo:
    """Runs evaluation, training and evaluation again on one running system."""

    def __init__(self, options: DemoOptions, directory: Path, config: Path, console: Console) -> None:
        self._options, self._directory, self._config_path = options, directory, config
        self._train = read_tasks(directory / "tasks" / "train.jsonl")
        self._held_out = read_tasks(directory / "tasks" / "held_out.jsonl")
        self._view = ProgressView(console)
        self._rewards: list[float] = []  # of the training rollouts, in the order in which they ended
        self._failed = self._steps = 0
        self._before: Totals | None = None
        self._steps_before = 0  # those that a demo which is resumed had taken
        self._began = time.monotonic()

    async def run(self) -> DemoResult:
        config = load_config(self._config_path)
        program = [sys.executable, str(EXAMPLE / AGENTS[self._options.api])]
        runner = LocalRunner(program, PRELOADED, say=self._view.say)
        system = System(config, Launch(self._config_path), self._directory / "logs", self._view.say)
        with self._view:
            async with system, ApiClient.of(config, patience_s=60) as api:
                try:
                    return await system.guard(self._loop(system, api, runner))
                finally:
                    await runner.close()

    async def _loop(self, system: System, api: ApiClient, runner: Runner) -> DemoResult:
        kept = self._directory / "before.json"
        if kept.is_file():
            self._before = before = Totals(**json.loads(kept.read_text()))
        else:
            self._before = before = await self._evaluate(api, runner, "base model, held out")
            save(asdict(before), kept)
        training = time.monotonic()
        await self._work_until_trained(system, api, runner)
        training_s = time.monotonic() - training
        after = await self._evaluate(api, runner, "trained, held out")
        policy = await api.policy()
        return DemoResult(
            self._options.seed, policy["steps"], policy["live_version"], before, after,
            curve(self._rewards, STEP_ROLLOUTS), training_s, time.monotonic() - self._began,
            (policy.get("best") or {}).get("story"), self._steps_before,
        )  # fmt: skip

    async def _evaluate(self, api: ApiClient, runner: Runner, label: str) -> Totals:
        how = RunOptions(self._options.repeat, CONCURRENCY, "eval")
        bar = self._view.bar(label, len(self._held_out) * how.group_size)
        return totals(await run_tasks(api, self._held_out, runner, how, bar.add))

    async def _work_until_trained(self, system: System, api: ApiClient, runner: Runner) -> None:
        """Let the agent work on tasks without end, until the trainer is done or nothing is left to learn."""
        assert system.trainer is not None
        how = RunOptions(GROUP_SIZE, CONCURRENCY, "train", self._directory / "agents")
        backlog = Backlog(api, int((1 + self._options.ahead) * STEP_ROLLOUTS), GROUP_SIZE)
        await self._recall(api, backlog)
        tasks = islice(self._tasks(), len(self._rewards) // GROUP_SIZE, None)
        working = asyncio.ensure_future(run_tasks(api, tasks, runner, how, self._take, backlog))
        trained = asyncio.ensure_future(system.trainer.process.wait())
        learnt = asyncio.ensure_future(self._until_nothing_is_left_to_learn(api))
        showing = asyncio.ensure_future(self._show_steps(api))
        telling = asyncio.ensure_future(tell_why_it_stands(system.trainer.log, self._view.say))
        started: set[asyncio.Future[Any]] = {working, trained, learnt, showing, telling}
        try:
            await asyncio.wait({working, trained, learnt}, return_when=asyncio.FIRST_COMPLETED)
            if not trained.done() and not learnt.done():
                with contextlib.suppress(PolicyCollapsed):
                    await working
                    raise LightningError("the agent stopped working before the trainer was done")
        finally:
            for future in started:
                future.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def _recall(self, api: ApiClient, backlog: Backlog) -> None:
        """Know the rollouts and steps of a demo that is resumed; what a kill left open has failed."""
        self._steps_before = (await api.policy())["steps"]
        completed = []
        async for rollout in api.every_rollout():
            if rollout["status"] == "running":
                await api.end_rollout(rollout["rollout_id"], "failed", KILLED)
            elif rollout["mode"] == "train" and rollout["status"] == "completed":
                completed.append(rollout)
            self._failed += rollout["mode"] == "train" and rollout["status"] in ("running", "failed")
        self._rewards = [rollout["reward"] for rollout in reversed(completed) if rollout["reward"] is not None]
        for rollout in completed[: 2 * STEP_ROLLOUTS]:  # the trainer may still wait for others beside these
            backlog.ended(rollout["rollout_id"])

    def reached(self) -> str:
        """Return a line about how far it came."""
        if self._before is None:
            return "nothing was trained: it ended before the base model was evaluated"
        rewards = {"of held-out tasks before": self._before.mean_reward, "of the newest": self._newest_reward()}
        known = "; ".join(f"mean reward {what} {mean:.3f}" for what, mean in rewards.items() if mean is not None)
        steps = f"{self._steps} of {self._options.steps} steps, {len(self._rewards)} training rollouts"
        return f"reached: {steps}; {known}" if known else f"reached: {steps}"

    def _newest_reward(self) -> float | None:
        """Return the mean reward of a step's worth of the newest training rollouts."""
        newest = self._rewards[-STEP_ROLLOUTS:]
        return sum(newest) / len(newest) if newest else None

    def _take(self, result: RolloutResult) -> None:
        self._failed += result.failed
        if result.reward is not None:
            self._rewards.append(result.reward)

    async def _show_steps(self, api: ApiClient) -> None:
        """Show the trainer's steps and the mean reward of the newest rollouts, until cancelled."""
        bar = self._view.bar("training steps", self._options.steps)
        try:
            while True:
                with contextlib.suppress(ApiError):  # a busy machine; the next look will do
                    self._steps = (await api.policy())["steps"]
                    bar.show(self._steps, self._newest_reward(), self._failed)
                await asyncio.sleep(POLL_S)
        finally:
            bar.tell()

    async def _until_nothing_is_left_to_learn(self, api: ApiClient) -> None:
        """Return when the newest rollouts of several steps all had equal rewards, or when the policy collapsed."""
        wanted = PERFECT_STEPS * STEP_ROLLOUTS
        while True:
            page = await api.rollouts(mode="train", status="completed", limit=wanted)
            if len(page["data"]) == wanted and all(one["dropped"] for one in page["data"]):
                return
            if (await api.policy())["collapse"]:
                return
            await asyncio.sleep(10 * POLL_S)

    def _tasks(self) -> Iterator[Task]:
        order = random.Random(self._options.seed)
        while True:
            yield from order.sample(self._train, len(self._train))
