"""`demo`: the main loop on a small real model, run with the same commands that a user has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.table import Table

from ...core.config.file import load_config
from ...core.errors import ConfigError, LightningError
from ..api_client import ApiClient, ApiError
from ..eval.report import save
from ..export.policy import where
from ..formats import share
from ..run.journal import KILLED
from ..run.limits import POLL_S, Backlog, PolicyCollapsed
from ..run.report import ProgressView, Totals, totals
from ..run.run import RolloutResult, RunOptions, run_tasks
from ..run.runner import LocalRunner, Runner
from ..run.tasks import Task, read_tasks
from ..signals import run_until_signal
from ..system.processes import free_port, make_directory
from ..system.steps import report_standstill
from ..system.system import Launch, System
from .model import cache_directory, require_packages

CONCURRENCY = 64
# `import openai` loads most of itself in the first call: 0.6 s of CPU in every run, 0.03 s with these preloaded.
PRELOADED = ("openai", "openai.resources", "httpcore", "h11", "certifi", "urllib.request")
PERFECT_STEPS = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "addition"
CONFIG = "config.yaml"
OPTIONS = "demo.json"  # marks a demo's directory
Api = Literal["chat", "messages", "responses"]
AGENTS: dict[Api, str] = {"chat": "demo_agent.py", "messages": "messages_agent.py", "responses": "responses_agent.py"}
GROUP_SIZE, TASKS_PER_STEP = 8, 8
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
        telling = asyncio.ensure_future(report_standstill(system.trainer.log, self._view.say))
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
            backlog.ended(rollout)

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
            bar.print_line()

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


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """`repeat` is the number of answers per held-out task and evaluation. `ahead` is that of `run`.

    With `ahead` above 0 the agent keeps running during a step. Its answers are then one version old and teach less.
    The agent speaks `api`.
    """

    steps: int = 90
    seed: int = 0
    directory: Path = Path("lightning-demo")
    model: Path | None = None
    repeat: int = 8
    ahead: float = 0.0
    api: Api = "chat"


def begin(options: DemoOptions) -> DemoOptions:
    """Make the demo's directory, or empty it if an earlier demo worked there, and keep the options for `resumed`.

    ConfigError if it holds anything else.
    """
    directory = make_directory(options.directory, "--dir")
    if any(directory.iterdir()):
        if _kept_options(directory) is None:
            raise ConfigError(f"{directory} is not empty and not an earlier demo's: choose another --dir")
        shutil.rmtree(directory)
        directory.mkdir()
    options = replace(options, directory=directory, model=options.model and options.model.absolute())
    paths = {"directory": str(directory), "model": options.model and str(options.model)}
    save(asdict(options) | paths, directory / OPTIONS)
    return options


def resumed(directory: Path) -> DemoOptions:
    """Return the options with which the demo in `directory` began. ConfigError if none did."""
    if (kept := _kept_options(directory)) is None:
        raise ConfigError(f"--resume: no demo was begun in {directory}")
    return DemoOptions(**kept | {"directory": directory.absolute(), "model": kept["model"] and Path(kept["model"])})


def _kept_options(directory: Path) -> dict[str, Any] | None:
    try:
        kept: dict[str, Any] = json.loads((directory / OPTIONS).read_text())
        return kept if kept["directory"] == str(directory.absolute()) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_config(directory: Path, model: Path, options: DemoOptions) -> Path:
    """Write the system's configuration, with ports that are free now."""
    proxy_port, vllm_port = free_port(), free_port()
    data: dict[str, Any] = {
        "proxy": {"port": proxy_port},
        "store": {"url": f"sqlite:///{directory / 'lightning.db'}"},
        "upstreams": [{"name": "policy", "base_url": f"http://127.0.0.1:{vllm_port}/v1"}],
        "policy": {"model": str(model), "publish": "merged", "directory": str(directory / "policy")},
        "vllm": {"port": vllm_port, "max_model_len": 512, "kv_cache_gib": 1.0},
        "trainer": {
            "group_size": GROUP_SIZE,
            "tasks_per_step": TASKS_PER_STEP,
            "lora_rank": 16,
            "poll_s": 0.1,
            "max_steps": options.steps,
            "seed": options.seed,
        },
    }
    path = directory / CONFIG
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The demo's result. `curve` has the mean reward of each step's worth of training rollouts, in order.

    `best`: the best version, in words. `steps_before`: those before it was resumed; the times are of the others.
    """

    seed: int
    steps: int
    version: int
    before: Totals
    after: Totals
    curve: tuple[float, ...]
    training_s: float
    total_s: float
    best: str | None = None
    steps_before: int = 0


def curve(rewards: Sequence[float], window: int) -> tuple[float, ...]:
    """Return the mean of each full window of consecutive rewards."""
    full = range(0, len(rewards) - window + 1, window)
    return tuple(sum(rewards[start : start + window]) / window for start in full)


def show(result: DemoResult, console: Console) -> None:
    """Print the table and the curve."""
    table = Table(title="held-out tasks, through the live proxy")
    for column in ("", "policy version", "rollouts", "exact answers", "mean reward"):
        table.add_column(column, justify="left" if not column else "right")
    for name, version, found in (("before", 0, result.before), ("after", result.version, result.after)):
        mean = "-" if found.mean_reward is None else f"{found.mean_reward:.3f}"
        table.add_row(name, str(version), str(found.rollouts), share(found.solved), mean)
    console.print(table)
    if len(result.curve) > 1:
        console.print(terminal_curve(result.curve, min(console.width, 100)), markup=False, highlight=False)
    since = f", {result.steps_before} of them before it was resumed, the others" * bool(result.steps_before)
    console.print(
        f"{result.steps} steps{since} in {result.training_s / 60:.1f} min, {result.total_s / 60:.1f} min in all"
    )
    if result.best is not None:
        console.print(f"the best is {result.best}")


def terminal_curve(values: Sequence[float], width: int) -> str:
    """Draw the reward curve in characters, without colours."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 15)
    figure.title("mean training reward, by steps' worth of rollouts")
    figure.draw(figure.signal(list(range(1, len(values) + 1)), list(values)).lines())
    return str(plotext.uncolorize(str(figure.build())))


def save_png(result: DemoResult, path: Path) -> None:
    """Save the reward curve as a picture, with both evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(result.curve) + 1), result.curve, label="training rollouts")
    for found, label, x in ((result.before, "held out, before", 0), (result.after, "held out, after", None)):
        if found.mean_reward is not None:
            position = len(result.curve) if x is None else x
            axes.plot([position], [found.mean_reward], "o", label=f"{label}: {found.mean_reward:.2f}")
    axes.set(xlabel="steps' worth of rollouts", ylabel="mean reward", ylim=(0, 1.05), title=f"seed {result.seed}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
