"""One run: held-out tasks, training, held-out tasks again, each by a command in its own process."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import yaml

from ...commands.api_client import ApiClient
from ...commands.run.tasks import read_tasks
from ...commands.system.processes import Child, ChildDied, ChildSpec, Supervisor, free_port, reason
from ...commands.system.steps import tell_why_it_stands
from ...commands.system.system import Launch
from ...core.config.file import config_of
from ...core.config.root import Config
from ...core.errors import LightningError
from .plan import Experiment, Json, LessonPlan, with_own

OF_STEP = ("reward_mean", "rollouts", "groups_equal", "entropy", "staleness_mean", "step_s")
GROUPS_A_MINUTE = 10_000  # more than agents can work off


class AgentFails(LightningError):
    """Every program of the first evaluation failed."""


class Lesson:
    """Runs a lesson in its folder, which is emptied first. `env`: of its processes, such as which GPUs they see."""

    def __init__(
        self, experiment: Experiment, lesson: LessonPlan, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.plan, self._lesson, self.env, self.say = experiment, lesson, env, say
        self.directory, self.logs = lesson.directory, lesson.directory / "logs"
        self.launch = Launch(lesson.directory / "config.yaml")
        self.minutes: dict[str, float] = {}

    async def run(self) -> Json:
        """Return what is kept of the lesson. LightningError has the reason from a log; AgentFails is one."""
        config = self.prepare()
        async with Supervisor(self.logs, self.say) as servers:
            with self.timed("start"):
                for command, path in (("vllm", f"{config.vllm.port}/health"), ("serve", f"{config.proxy.port}/readyz")):
                    url, limit = f"http://127.0.0.1:{path}", config.vllm.start_timeout_s
                    spec = ChildSpec(command, self.launch.argv(command), self.env, url, limit)
                    await servers.wait_healthy(await servers.start(spec))
            return await servers.guard(self.stages(config))

    async def stages(self, config: Config) -> Json:
        """Do all that is done while vLLM and proxy serve, and return what is kept."""
        self.say("the held-out tasks are evaluated")
        before = await self.evaluate("before")
        self.say(f"held out {before['mean_reward']:.3f}; training")
        async with ApiClient.of(config, patience_s=60) as api:
            with self.timed("training"):
                await self.train(api)
            after = await self.evaluate("after")
            found = await self.found(api)
        self.say(
            f"held out {after['mean_reward']:.3f} after {found['rollouts']} rollouts, {found['steps_taken']} steps"
        )
        about = {"variant": self._lesson.variant, "seed": self._lesson.seed, "made_with": self._lesson.made_with}
        return about | {"held_out": {"before": before, "after": after}, "minutes": self.minutes} | found

    async def evaluate(self, name: str) -> Json:
        """Mean reward of the held-out tasks with the live version, and each task's own."""
        out = self.directory / f"{name}.json"
        asked = ["--tasks", str(self.plan.held_out), "--samples", str(self.plan.samples), "--out", str(out)]
        with self.timed("evaluations"):
            async with Supervisor(self.logs) as own:
                try:
                    await self.done(own, name, "eval", *asked, *self.agent())
                except ChildDied:
                    if name == "before" and _every_program_failed(out):
                        log = self.logs / f"{name}.log"
                        raise AgentFails(f"{reason(log)}; see {log}") from None
                    raise
        row = json.loads(out.read_text())["rows"][0]
        by_task = {task: found["mean_reward"] for task, found in row["by_task"].items()}
        kept = ("mean_reward", "interval", "policy_versions", "rollouts", "failed", "without_reward", "tokens")
        return {key: row[key] for key in kept} | {"by_task": by_task}

    async def train(self, api: ApiClient) -> None:
        """Let agents work and the trainer learn, until the rollouts or the minutes are used up."""
        minutes, tasks = self.plan.minutes, self.directory / "tasks.jsonl"
        work = ["--tasks", str(tasks), "--ahead", str(self.plan.ahead)]
        if minutes:
            work += ["--repeat", str(math.ceil(minutes * GROUPS_A_MINUTE / len(read_tasks(tasks))))]
        async with Supervisor(self.logs) as both:
            trainer = await both.start(self.spec("trainer", "train"))
            agents = await both.start(self.spec("agents", "run", *work, *self.agent()))
            telling = asyncio.ensure_future(tell_why_it_stands(trainer.log, self.say))
            ends = [asyncio.ensure_future(child.process.wait()) for child in (trainer, agents)]
            timeout = minutes * 60 if minutes else None
            try:
                await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                telling.cancel()
            stopped = (await api.policy())["collapse"] is not None
            if agents.process.returncode and not stopped:
                raise agents.death()
            done = trainer.process.returncode is not None  # trainer.max_steps
            for child in (agents, trainer):
                await _end(child, may_fail=child is agents)
        if not (done or stopped or minutes):
            async with Supervisor(self.logs) as rest:
                await self.done(rest, "trainer-rest", "train", "--once")

    async def found(self, api: ApiClient) -> Json:
        """What the proxy knows of the training."""
        policy = await api.policy()
        steps = (await api.request("GET", "/policy/steps", params={"limit": "1000"}))["data"]
        everything = [one async for one in api.every_rollout()]
        rollouts = [one for one in everything if one["mode"] == "train" and one["status"] != "discarded"]
        curve = [{"step": one["step"], **{key: one["metrics"].get(key) for key in OF_STEP}} for one in steps]
        return {
            "rollouts": len(rollouts),
            "trained_on": sum(one["step"] is not None for one in rollouts),
            "calls": sum(one["calls"] for one in everything),
            "tokens": sum(one["tokens"] for one in rollouts),
            "version": policy["live_version"],
            "steps_taken": policy["steps"],
            "collapse": policy["collapse"],
            "steps": sorted(curve, key=lambda one: one["step"]),
        }

    def prepare(self) -> Config:
        """Empty the folder; write configuration and tasks. Return the configuration."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.logs.mkdir(parents=True)
        settings = with_own(self._lesson.settings, self.directory, self._lesson.seed, free_port(), free_port())
        (self.directory / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        self.write_tasks()
        return config_of(settings)

    def write_tasks(self) -> None:
        """Write tasks.jsonl: the tasks in an order of the seed, as often as it takes."""
        lines = [task.line for task in read_tasks(self.plan.tasks)]
        group_size = self._lesson.config.trainer.group_size
        groups = len(lines) if self.plan.rollouts is None else self.plan.rollouts // group_size
        order = islice(_shuffled(lines, self._lesson.seed), groups)
        (self.directory / "tasks.jsonl").write_text("".join(f"{line}\n" for line in order))

    def spec(self, name: str, *command: str, **env: str) -> ChildSpec:
        """Return a command of lightning-proxy as a child, which logs to NAME.log."""
        return ChildSpec(name, self.launch.argv(*command), {**self.env, **env}, may_end=True)

    async def done(self, supervisor: Supervisor, name: str, *command: str, **env: str) -> None:
        """Run a command to its end. Raise ChildDied if it fails."""
        child = await supervisor.start(self.spec(name, *command, **env))
        if await child.process.wait():
            raise child.death()

    def agent(self, concurrency: int | None = None) -> list[str]:
        """Return how `run` and `eval` start it, as many programs at once as the experiment says, or `concurrency`."""
        preload = ["--preload", self.plan.preload] if self.plan.preload else []
        return [*preload, "--concurrency", str(concurrency or self.plan.concurrency), "--", *self.plan.agent]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the block's minutes."""
        started = time.monotonic()
        yield
        self.minutes[name] = round(self.minutes.get(name, 0.0) + (time.monotonic() - started) / 60, 2)


def _every_program_failed(evaluation: Path) -> bool:
    """Return whether an evaluation that failed got to its end."""
    rows = json.loads(evaluation.read_text())["rows"] if evaluation.is_file() else []
    return bool(rows) and all(row["complete"] and row["failed"] == row["rollouts"] for row in rows)


def _shuffled(lines: Sequence[str], seed: int) -> Iterator[str]:
    """All tasks in another order in each pass, without end."""
    order = random.Random(seed)
    while True:
        yield from order.sample(lines, len(lines))


async def _end(child: Child, *, may_fail: bool) -> None:
    """Ask a child to end, and wait: a trainer finishes its step. Raise ChildDied if it failed before it was asked."""
    if child.running:
        child.process.send_signal(signal.SIGINT)
        await child.process.wait()
    elif child.process.returncode and not may_fail:
        raise child.death()
