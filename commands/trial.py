"""A trial: an evaluation, training, and an evaluation again. `demo` runs one, `experiment` one per variant and seed."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, chain, islice, repeat
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field

from ..core.config.file import load_config
from ..core.config.root import Config
from ..core.config.section import Section
from ..core.errors import LightningError
from .api_client import ApiClient
from .run.tasks import read_tasks
from .system.processes import ChildSpec, Supervisor, free_port
from .system.steps import say_warnings
from .system.system import RESTARTS, Launch, running_system

Json = dict[str, Any]
OF_EVALUATION = ("mean_reward", "interval", "policy_versions", "rollouts", "failed", "without_reward", "tokens")
OF_STEP = ("reward_mean", "rollouts", "groups_equal", "entropy", "staleness_mean", "step_s")


class Work(Section):
    """What agents do in a trial. `samples`: how many rollouts an evaluation makes of each held-out task."""

    agent: Annotated[
        list[str],
        BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value),
        Field(min_length=1),
    ]
    tasks: Path
    held_out: Path
    samples: Annotated[int, Field(ge=1, le=1000)] = 4
    concurrency: Annotated[int, Field(ge=1)] = 8
    ahead: Annotated[float, Field(ge=0, le=1000)] = 0.0
    preload: str = ""


class Trial:
    """Runs a trial in a directory that has a config.yaml and a tasks.jsonl.

    `env`: variables for its processes, such as the visible GPUs. `passes`: how many times agents work on the tasks.
    """

    passes = 1

    def __init__(
        self, work: Work, directory: Path, say: Callable[[str], None], env: Mapping[str, str] | None = None
    ) -> None:
        self.work, self.directory, self.say = work, directory, say
        self.logs = directory / "logs"
        self.launch = Launch(directory / "config.yaml", variables=env or {})
        self.minutes: dict[str, float] = {}

    async def run(self) -> Json:
        """Run the trial and return its result. Raises LightningError if one of its processes fails."""
        config = load_config(self.launch.path)
        async with AsyncExitStack() as stack:
            with self.timed("start"):
                parts = running_system(config, self.launch, self.logs, self.say, trains=False)
                system = await stack.enter_async_context(parts)
            return await system.guard(self.stages(config))

    async def stages(self, config: Config) -> Json:
        """Evaluate, train and evaluate again while vLLM and proxy run. Return the result."""
        with self.timed("evaluations"):
            before = await self.evaluate("before")
        self.say(f"held-out reward {before['mean_reward']:.3f}; training starts")
        async with ApiClient.of(config, patience_s=60) as api:
            with self.timed("training"):
                await self.train(api)
            with self.timed("evaluations"):
                after = await self.evaluate("after")
            found = await self.found(api)
        work = f"{found['rollouts']} rollouts, {found['steps_taken']} steps"
        self.say(f"held-out reward {after['mean_reward']:.3f} after {work}")
        return {"held_out": {"before": before, "after": after}, "minutes": self.minutes} | found

    async def evaluate(self, name: str) -> Json:
        """Evaluate the live version on the held-out tasks. Return its mean reward, also by task, and other results.

        An evaluation that is already complete is not repeated.
        """
        out = self.directory / f"{name}.json"
        if (row := evaluation(out)) is None:
            self.say("evaluating the held-out tasks")
            options = ["--tasks", str(self.work.held_out), "--samples", str(self.work.samples), "--out", str(out)]
            await self.done(name, "eval", *options, *self.agent())
            row = evaluation(out)
        if row is None:
            raise LightningError(f"the evaluation {name!r} is incomplete; see {self.logs / name}.log")
        by_task = {task: found["mean_reward"] for task, found in row["by_task"].items()}
        passed = row["pass_at_k"]["1"]["value"]
        return {key: row[key] for key in OF_EVALUATION} | {"passed": passed, "by_task": by_task}

    async def train(self, api: ApiClient) -> None:
        """Let agents work and the trainer learn until the tasks are used up, the trainer is done, or `ended` returns.

        If the tasks are used up first, train on the remaining rollouts.
        """
        options = ["--tasks", str(self.directory / "tasks.jsonl"), "--ahead", str(self.work.ahead)]
        options += ["--repeat", str(self.passes), *self.agent()]
        async with Supervisor(self.logs) as both:
            trainer = await both.start(self.spec("trainer", "train", restarts=RESTARTS))
            agents = await both.start(self.spec("agents", "run", *options))
            telling = say_warnings(trainer.log, self.say)
            work = (agents.process.wait(), both.keep_up(trainer), self.ended(api), telling)
            futures = [asyncio.ensure_future(one) for one in work]
            try:
                done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()
                await asyncio.gather(*futures, return_exceptions=True)
            collapsed = (await api.policy())["collapse"] is not None
            if agents.process.returncode and not collapsed:
                raise agents.death()
            await agents.interrupt()
            await trainer.interrupt()  # it finishes its step
        if done == {futures[0]} and not collapsed:
            await self.done("trainer-rest", "train", "--once")

    async def ended(self, api: ApiClient) -> None:
        """Return when training should end before the tasks are used up."""
        raise NotImplementedError

    async def found(self, api: ApiClient) -> Json:
        """Return the results of the training, as the proxy reports them."""
        policy = await api.policy()
        best = policy.get("best") or {}
        steps = (await api.request("GET", "/policy/steps", params={"limit": "1000"}))["data"]
        rollouts = [one async for one in api.every_rollout(mode="train") if one["status"] != "discarded"]
        curve = [{"step": one["step"], **{key: one["metrics"].get(key) for key in OF_STEP}} for one in steps]
        return {
            "rollouts": len(rollouts),
            "tokens": sum(one["tokens"] for one in rollouts),
            "version": policy["live_version"],
            "best": best.get("story"),
            "best_version": best.get("version"),
            "steps_taken": policy["steps"],
            "collapse": policy["collapse"],
            "steps": sorted(curve, key=lambda one: one["step"]),
        }

    def prepare(self, settings: Json, seed: int, groups: int) -> None:
        """Write `groups` shuffled tasks to tasks.jsonl and the trial's `settings`, with free ports, to config.yaml."""
        lines, order = [task.line for task in read_tasks(self.work.tasks)], random.Random(seed)
        shuffled = chain.from_iterable(order.sample(lines, len(lines)) for _ in repeat(None))
        (self.directory / "tasks.jsonl").write_text("".join(f"{line}\n" for line in islice(shuffled, groups)))
        vllm_port, upstreams = free_port(), deepcopy(settings.get("upstreams") or [{"name": "policy"}])
        policys = next(one for one in upstreams if one.get("kind", "vllm") == "vllm")
        policys["base_url"] = f"http://127.0.0.1:{vllm_port}/v1"
        own = {
            "proxy": {"host": "127.0.0.1", "port": free_port()},
            "vllm": {"port": vllm_port},
            "store": {"url": f"sqlite:///{self.directory / 'lightning.db'}"},
            "policy": {"directory": str(self.directory / "policy")},
            "trainer": {"seed": seed},
            "upstreams": upstreams,
        }
        (self.directory / "config.yaml").write_text(yaml.safe_dump(merged(settings, own), sort_keys=False))

    def agent(self, concurrency: int | None = None) -> list[str]:
        """Return the arguments with which `run` and `eval` start the agent."""
        preload = ["--preload", self.work.preload] if self.work.preload else []
        return [*preload, "--concurrency", str(concurrency or self.work.concurrency), "--", *self.work.agent]

    def spec(self, name: str, *command: str, restarts: int = 0) -> ChildSpec:
        """Return a lightning-proxy command as a child process that logs to NAME.log."""
        return ChildSpec(name, self.launch.argv(*command), self.launch.env(), may_end=True, restarts=restarts)

    async def done(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Run a command to its end, with further variables. Raise ChildDied if it fails."""
        spec = self.spec(name, *command)
        async with Supervisor(self.logs) as own:
            await own.keep_up(await own.start(replace(spec, env={**spec.env, **(env or {})})))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's duration to `minutes`."""
        started = time.monotonic()
        yield
        self.minutes[name] = round(self.minutes.get(name, 0.0) + (time.monotonic() - started) / 60, 2)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Json:
    """Return `base` with `changes` laid over it, section by section."""
    found = deepcopy(dict(base))
    for key, value in changes.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else deepcopy(value)
    return found


def evaluation(file: Path) -> Json | None:
    """Return the numbers of an evaluation; None if it is unfinished or all of its programs failed."""
    row: Json | None = json.loads(file.read_text())["rows"][0] if file.is_file() else None
    return row if row and row["complete"] and row["failed"] < row["rollouts"] else None


def draw(results: Sequence[Json], path: Path) -> None:
    """Save a plot of the mean reward over the number of rollouts. Raises LightningError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise LightningError("the curves need matplotlib: pip install 'lightning-proxy[demo]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for one in results:
        label = None if one["variant"] in colours else one["variant"]
        colour = colours.setdefault(one["variant"], f"C{len(colours)}")
        steps = [step for step in one["steps"] if step["reward_mean"] is not None]
        seen, means = [*accumulate(step["rollouts"] for step in steps)], [step["reward_mean"] for step in steps]
        axes.plot(seen, means, marker=".", color=colour, alpha=0.6, linewidth=1, label=label)
        ends = [one["held_out"][when]["mean_reward"] for when in ("before", "after")]
        axes.plot([0, one["rollouts"]], ends, "o", color=colour, fillstyle="none")
    axes.set(xlabel="rollouts", ylabel="mean reward (rings: held-out tasks)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
