"""Evaluates new versions on held-out tasks while the trainer takes steps (`evaluation`), as the command `eval` does.

What is owed is read off the store, so a restart changes nothing.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Mapping
from itertools import count
from statistics import fmean
from typing import Any

from rich.console import Console

from ...commands.api_client import ApiClient
from ...commands.eval.eval import evaluate
from ...commands.eval.report import EvalRow, report
from ...commands.run.command import programs, run_options
from ...commands.run.limits import Observer
from ...commands.run.report import ProgressView
from ...commands.run.run import require_success
from ...commands.run.runner import runner_for
from ...commands.run.tasks import read_tasks
from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...core.records import PolicyVersion
from ...core.statistics import bootstrap_mean
from ...trainer.plugins import TrainerCore
from ...trainer.types import BackgroundWork
from ...trainer.waiting import Stopped, pause
from .config import EvaluationConfig
from .evaluations import Evaluations

log = logging.getLogger(__name__)
LOOK_S = 0.5
QUIET_S = 60.0  # a rollout that has called nothing for so long holds no evaluation up
SHARE = 0.5  # of `timeout_s`, over which an evaluation is spread while agents work
CONCURRENCY = 4
# Agents' programs and the trainer have the processors first, and no held-out agent goes on with the trainer's run.
PREFIX = ("env", "-u", "WANDB_RUN_ID", "-u", "WANDB_RESUME", "-u", "MLFLOW_RUN_ID", "nice", "-n", "10")


class Pace(Observer):
    """Lets a rollout begin while no agent works, or else at its place in an even spread over half of `timeout_s`."""

    def __init__(self, evaluations: Evaluations, timeout_s: float, rollouts: int) -> None:
        self._evaluations, self._apart_s = evaluations, SHARE * timeout_s / rollouts
        self._began, self._places = time.monotonic(), count()

    async def wait(self) -> bool:
        until = self._began + self._apart_s * next(self._places)
        while time.monotonic() < until and await self._agents_work():  # noqa: ASYNC110 - nothing tells of a pause
            await asyncio.sleep(LOOK_S)
        return True

    async def _agents_work(self) -> bool:
        try:
            return await self._evaluations.agents_work(time.time() - QUIET_S)
        except StoreUnavailable:
            return True


class Evaluator(BackgroundWork):
    """Evaluates the live version every so many steps. Merged weights stay live until that is done.

    Without `evaluation.tasks` it only keeps the files of the best version, whoever evaluated it.
    """

    def __init__(self, core: TrainerCore) -> None:
        assert core.swap is not None
        self._core, self._config = core, core.config.section(EvaluationConfig)
        self._merged = core.swap.mode == "merged"
        self.evaluations = Evaluations(core.store)
        self._working: asyncio.Future[None] | None = None  # fine-tuning publishes without it
        self._ended = False

    async def keep(self) -> set[int]:
        best = await self.evaluations.best()
        return await self.evaluations.under_way() | (set() if best is None else {best.version})

    async def run(self) -> None:
        if self._config.tasks is None:
            return
        self._working = asyncio.ensure_future(self._work())
        try:
            await self._working
        except asyncio.CancelledError:
            if not self._ended:
                raise

    async def finish(self, stop: asyncio.Event) -> None:
        while self._working is not None and not stop.is_set():
            try:
                if await self.owed() is None:
                    break
            except StoreUnavailable as error:
                log.error("evaluations wait: %s", error)
            await pause(stop, LOOK_S)
        self._ended = True
        if self._working is not None:
            self._working.cancel()

    async def before_publishing(self, stop: asyncio.Event) -> None:
        while self._working is not None and self._merged and await self.owed() is not None:
            await pause(stop, LOOK_S)
            if stop.is_set():
                raise Stopped

    async def owed(self) -> PolicyVersion | None:
        """Return the live version if it is to be evaluated: none was before, or `every_steps` were taken since."""
        live = await self._core.store.versions.live()
        last, own = await self.evaluations.last(), await self.evaluations.of(live.version)  # it may begin in between
        if own is not None:
            return None if own.ended_at is not None else live
        return live if last is None or (live.step or 0) - last.step >= self._config.every_steps else None

    async def _work(self) -> None:
        while True:
            try:
                await self.evaluations.forget_broken_off((await self._core.store.versions.live()).version)
                while True:
                    if (owed := await self.owed()) is not None:
                        await self._evaluate(owed.version, owed.step or 0)
                    await asyncio.sleep(LOOK_S)
            except StoreUnavailable as error:
                log.error("evaluations wait: %s", error)
                await asyncio.sleep(LOOK_S)

    async def _evaluate(self, version: int, step: int) -> None:
        """Evaluate a version, and keep the result or why there is none."""
        await self.evaluations.begin(version, step)
        log.info("policy version %d is evaluated on held-out tasks", version)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                row = await self._row(version)
        except Exception as error:  # training goes on, whatever is wrong here
            late = f"it was not done after {self._config.timeout_s:g} s (evaluation.timeout_s)"
            why = late if isinstance(error, TimeoutError) else str(error) or repr(error)
            is_fault = not isinstance(error, (LightningError, OSError))
            log.warning("policy version %d is not evaluated: %s", version, why, exc_info=is_fault)
            await self.evaluations.ended(version, {}, error=why)
            return
        by_task = {task: float(of_task["mean_reward"]) for task, of_task in row["by_task"].items()}
        reward, low, high = row["mean_reward"], row["interval"]["low"], row["interval"]["high"]
        counts = {name: row[name] for name in ("tasks", "rollouts", "failed")}
        above = _above_first(by_task, await self.evaluations.first())
        await self.evaluations.ended(version, by_task, reward=reward, low=low, high=high, **counts, **above)
        numbers = {"eval_reward": reward, "eval_low": low, "eval_high": high, "eval_step": step}
        self._core.engine.trackers.report(numbers)
        log.info("policy version %d: held-out reward %.3f (%.3f to %.3f)", version, reward, low, high)

    async def _row(self, version: int) -> dict[str, Any]:
        """Run the held-out tasks with a version, each rollout a group of its own; return its row of the report."""
        config, own = self._core.config, self._config
        assert own.tasks is not None
        weights = config.trainer.training_weights.items()
        if why_not := config.not_absolute([name for name, weight in weights if weight]):
            raise ConfigError(why_not)
        tasks, row = read_tasks(own.tasks) * own.samples, EvalRow(str(version))
        view = ProgressView(Console(file=io.StringIO()))
        prefix = PREFIX if config.run.executor == "local" else ()
        runner = runner_for(config, [*prefix, *own.command], (), view.say)
        options = run_options(config, 1, CONCURRENCY, "eval", None)
        pace = Pace(self.evaluations, own.timeout_s, len(tasks))
        async with programs(api := ApiClient.of(config, patience_s=60), runner, view):
            await evaluate(api, tasks, runner, options, [row], view, pace, promote=False)
        require_success(row.results)
        numbers: dict[str, Any] = report([row], {})["rows"][0]
        return numbers


def _above_first(by_task: Mapping[str, float], first: tuple[int, Mapping[str, float]] | None) -> dict[str, float]:
    """How far rewards are above those of the first version, paired by task; nothing for the first one itself."""
    differences = [by_task[task] - first[1][task] for task in by_task if task in first[1]] if first else []
    if not differences:
        return {}
    interval = bootstrap_mean(differences, 0)
    return {
        "difference": fmean(differences),
        "difference_low": interval.low,
        "difference_high": interval.high,
    }
