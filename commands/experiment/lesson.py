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

import yaml

from ..api_client import ApiClient
from ..run.tasks import read_tasks
from ..system.processes import Child, ChildSpec, Supervisor, free_port
from ..system.system import Launch
from .plan import Experiment, Json, LessonPlan, with_own

OF_STEP = ("reward_mean", "rollouts", "groups_equal", "entropy", "staleness_mean", "step_s")
GROUPS_A_MINUTE = 10_000  # more than agents can work off


class Lesson:
    """Runs a lesson in its folder, which is emptied first. `env`: which GPUs its processes see."""

    def __init__(
        self, experiment: Experiment, lesson: LessonPlan, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._plan, self._lesson, self._env, self._say = experiment, lesson, env, say
        self._directory, self._logs = lesson.directory, lesson.directory / "logs"
        self._launch = Launch(lesson.directory / "config.yaml")
        self._minutes: dict[str, float] = {}

    async def run(self) -> Json:
        """Return what is kept of the lesson. LightningError has the end of a log."""
        proxy, vllm = self._prepare()
        async with Supervisor(self._logs) as servers:
            with self._timed("start"):
                for name, command, url in (("vllm", "vllm", f"{vllm}/health"), ("proxy", "serve", f"{proxy}/readyz")):
                    limit = self._lesson.config.vllm.start_timeout_s
                    spec = ChildSpec(name, self._launch.argv(command), self._env, url, limit)
                    await servers.wait_healthy(await servers.start(spec))
            return await servers.guard(self._stages(proxy))

    async def _stages(self, proxy: str) -> Json:
        before = await self._evaluate("before")
        self._say(f"held out {before['mean_reward']:.3f}; training")
        async with ApiClient(proxy, self._key(), patience_s=60) as api:
            with self._timed("training"):
                await self._train(api)
            after = await self._evaluate("after")
            found = await self._found(api)
        self._say(
            f"held out {after['mean_reward']:.3f} after {found['rollouts']} rollouts, {found['steps_taken']} steps"
        )
        about = {"variant": self._lesson.variant, "seed": self._lesson.seed, "made_with": self._lesson.made_with}
        return about | {"held_out": {"before": before, "after": after}, "minutes": self._minutes} | found

    async def _evaluate(self, name: str) -> Json:
        """Mean reward of the held-out tasks with the live version, and each task's own."""
        out = self._directory / f"{name}.json"
        asked = ["--tasks", str(self._plan.held_out), "--samples", str(self._plan.samples), "--out", str(out)]
        with self._timed("evaluations"):
            async with Supervisor(self._logs) as own:
                child = await own.start(self._spec(name, "eval", *asked, *self._agent()))
                if await child.process.wait():
                    raise child.death()
        row = json.loads(out.read_text())["rows"][0]
        by_task = {task: found["mean_reward"] for task, found in row["by_task"].items()}
        kept = ("mean_reward", "policy_versions", "rollouts", "failed", "without_reward", "tokens")
        return {key: row[key] for key in kept} | {"by_task": by_task}

    async def _train(self, api: ApiClient) -> None:
        """Let agents work and the trainer learn, until the rollouts or the minutes are used up."""
        minutes = self._plan.minutes
        work = ["--tasks", str(self._directory / "tasks.jsonl"), "--ahead", str(self._plan.ahead)]
        if minutes:
            work += ["--repeat", str(math.ceil(minutes * GROUPS_A_MINUTE / len(read_tasks(self._plan.tasks))))]
        async with Supervisor(self._logs) as both:
            trainer = await both.start(self._spec("trainer", "train"))
            agents = await both.start(self._spec("agents", "run", *work, *self._agent()))
            ends = [asyncio.ensure_future(child.process.wait()) for child in (trainer, agents)]
            timeout = minutes * 60 if minutes else None
            await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            stopped = (await api.policy())["collapse"] is not None
            if agents.process.returncode and not stopped:
                raise agents.death()
            done = trainer.process.returncode is not None  # trainer.max_steps
            for child in (agents, trainer):
                await _end(child, may_fail=child is agents)
        if not (done or stopped or minutes):
            async with Supervisor(self._logs) as rest:
                trainer = await rest.start(self._spec("trainer-rest", "train", "--once"))
                if await trainer.process.wait():
                    raise trainer.death()

    async def _found(self, api: ApiClient) -> Json:
        """What the proxy knows of the training."""
        policy = await api.policy()
        steps = (await api.request("GET", "/policy/steps", params={"limit": "1000"}))["data"]
        everything, cursor = [], None
        while True:
            page = await api.rollouts(limit=1000, cursor=cursor)
            everything += page["data"]
            if (cursor := page["next_cursor"]) is None:
                break
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

    def _prepare(self) -> tuple[str, str]:
        """Empty the folder; write configuration and tasks. Return where proxy and vLLM will be."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._logs.mkdir(parents=True)
        ports = free_port(), free_port()
        settings = with_own(self._lesson.settings, self._directory, self._lesson.seed, *ports)
        (self._directory / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        lines = [task.line for task in read_tasks(self._plan.tasks)]
        group_size = self._lesson.config.trainer.group_size
        groups = len(lines) if self._plan.rollouts is None else self._plan.rollouts // group_size
        order = islice(_shuffled(lines, self._lesson.seed), groups)
        (self._directory / "tasks.jsonl").write_text("".join(f"{line}\n" for line in order))
        proxy, vllm = (f"http://127.0.0.1:{port}" for port in ports)
        return proxy, vllm

    def _spec(self, name: str, *command: str) -> ChildSpec:
        return ChildSpec(name, self._launch.argv(*command), self._env, may_end=True)

    def _agent(self) -> list[str]:
        """How `run` and `eval` start it."""
        preload = ["--preload", self._plan.preload] if self._plan.preload else []
        return [*preload, "--concurrency", str(self._plan.concurrency), "--", *self._plan.agent]

    def _key(self) -> str | None:
        proxy = self._lesson.config.proxy
        return next((key.get_secret_value() for key in proxy.admin_keys or proxy.api_keys), None)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._minutes[name] = round(self._minutes.get(name, 0.0) + (time.monotonic() - started) / 60, 2)


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
