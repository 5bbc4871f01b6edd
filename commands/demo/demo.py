"""`demo`: the whole loop on a small real model, as an ordinary user of the product would run it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ...proxy.config.file import load_config
from ...proxy.errors import LightningError
from ..api_client import ApiClient, ApiError
from ..run.backlog import POLL_S, Backlog, PolicyCollapsed
from ..run.programs import PreloadRunner, Runner
from ..run.run import RunOptions, run_tasks
from ..run.summary import Totals, totals
from ..run.tasks import Task
from ..signals import run_until_signal
from ..system.system import Launch, System
from .config import EXAMPLE, GROUP_SIZE, TASKS_PER_STEP, DemoOptions, dump, empty_directory, read_split, write_config
from .model import cache_directory, require_packages
from .report import DemoResult, curve, save_png, show
from .view import DemoState, DemoView

CONCURRENCY = 64
# `import openai` leaves most of itself to the first call: 0.6 s of CPU in every run, 0.03 s with these imported.
PRELOADED = ("openai", "openai.resources", "httpcore", "h11", "certifi", "urllib.request")
PERFECT_STEPS = 4
STEP_ROLLOUTS = GROUP_SIZE * TASKS_PER_STEP


def demo(options: DemoOptions) -> None:
    """Prepare model, tasks and configuration; run the loop; show and save what came of it."""
    console = Console()
    require_packages()
    directory = empty_directory(options.directory)
    tasks = directory / "tasks"
    subprocess.run([sys.executable, EXAMPLE / "tasks.py", tasks, f"--seed={options.seed}"], check=True)
    console.print("[dim]preparing the model[/]")
    # In a process of its own: what torch and transformers take is given back before the loop starts.
    model = (options.model or cache_directory()).absolute()
    if not (model / "config.json").is_file():
        made = subprocess.run([sys.executable, "-m", "lightning_proxy.commands.demo.model", model], check=False)
        if made.returncode != 0:
            raise LightningError(f"the demo's model could not be made in {model}; why is said above")
    config = write_config(directory, model, options)
    result = run_until_signal(Demo(options, directory, config, console).run())
    dump(directory / "result.json", result.as_json())
    save_png(result, directory / "reward.png")
    show(result, console)
    console.print(f"curve: {directory / 'reward.png'}, data: {directory / 'result.json'}", soft_wrap=True)


class Demo:
    """Evaluation, training, evaluation against one running system."""

    def __init__(self, options: DemoOptions, directory: Path, config: Path, console: Console) -> None:
        self._options, self._directory, self._config_path = options, directory, config
        self._train, self._held_out = read_split(directory / "tasks")
        self._state = DemoState(options.steps)
        self._view = DemoView(self._state, console)

    async def run(self) -> DemoResult:
        config = load_config(self._config_path)
        runner = PreloadRunner([sys.executable, str(EXAMPLE / "agent.py")], PRELOADED)
        system = System(config, Launch(self._config_path), self._directory / "logs", self._phase)
        with self._view.shown():
            async with system, ApiClient.of(config, patience_s=60) as api, _closing(runner):
                return await system.guard(self._loop(system, api, runner))

    async def _loop(self, system: System, api: ApiClient, runner: Runner) -> DemoResult:
        async with _background(self._poll(api)):
            self._phase("evaluating the base model on held-out tasks")
            before = await self._evaluate(api, runner)
            self._phase("training while the agent goes on working")
            started = time.monotonic()
            await self._work_until_trained(system, api, runner)
            training_s = time.monotonic() - started
            self._phase("evaluating the trained model on held-out tasks")
            after = await self._evaluate(api, runner)
            self._state.take(await api.policy())
        state, rewards = self._state, curve(self._state.rewards, STEP_ROLLOUTS)
        self._phase("stopping")
        return DemoResult(
            self._options.seed, state.step, state.version, before, after, rewards, training_s, state.elapsed
        )

    async def _evaluate(self, api: ApiClient, runner: Runner) -> Totals:
        how = RunOptions(self._options.repeat, CONCURRENCY, "eval")
        return totals(await run_tasks(api, self._held_out, runner, how, self._state.add_evaluated))

    async def _work_until_trained(self, system: System, api: ApiClient, runner: Runner) -> None:
        """The agent works on tasks without end; until the trainer has done its steps, or nothing is left to learn."""
        assert system.trainer is not None
        how = RunOptions(GROUP_SIZE, CONCURRENCY, "train", self._directory / "agents")
        backlog = Backlog(api, int((1 + self._options.ahead) * STEP_ROLLOUTS), GROUP_SIZE)
        work = run_tasks(api, self._tasks(), runner, how, self._state.add, backlog)
        working = asyncio.ensure_future(work)
        trained = asyncio.ensure_future(system.trainer.process.wait())
        learnt = asyncio.ensure_future(self._until_nothing_is_left_to_learn(api))
        either: set[asyncio.Future[Any]] = {working, trained, learnt}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not trained.done() and not learnt.done():
                with contextlib.suppress(PolicyCollapsed):
                    await working
                    raise LightningError("the agent stopped working before the trainer was done")
        finally:
            for future in either:
                future.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    async def _until_nothing_is_left_to_learn(self, api: ApiClient) -> None:
        """Return when all groups of some steps' worth of rollouts had equal rewards, or when the policy collapsed."""
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

    async def _poll(self, api: ApiClient) -> None:
        while True:
            with contextlib.suppress(ApiError):  # a busy machine; the next look will do
                self._state.take(await api.policy())
                self._view.changed()
            await asyncio.sleep(POLL_S)

    def _phase(self, phase: str) -> None:
        self._state.phase = phase
        self._view.changed()


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _closing(runner: Runner) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await runner.close()
