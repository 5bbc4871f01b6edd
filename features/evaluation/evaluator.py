"""Evaluates new versions on held-out tasks between training steps, as the command `eval` does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rich.console import Console

from ...commands.api_client import ApiClient
from ...commands.eval import EvalRow, evaluate
from ...commands.run.command import programs, run_options
from ...commands.run.report import ProgressView
from ...commands.run.run import require_success
from ...commands.run.runner import runner_for
from ...commands.run.tasks import read_tasks
from ...core.errors import ConfigError, LightningError, StoreUnavailable
from ...core.records import PolicyVersion
from ...trainer.plugins import TrainerCore
from .config import EvaluationConfig
from .evaluations import Evaluations

log = logging.getLogger(__name__)
CONCURRENCY = 4
ALONE = ("env", "-u", "WANDB_RUN_ID", "-u", "WANDB_RESUME", "-u", "MLFLOW_RUN_ID")  # no agent joins the trainer's run


class Evaluator:
    """Evaluates the first live version, then one every `every_steps` steps. Its state is in the store."""

    def __init__(self, core: TrainerCore) -> None:
        self._core, self._config = core, core.config.section(EvaluationConfig)
        self.evaluations = Evaluations(core.store)

    async def keep(self) -> set[int]:
        """Return the versions that must keep their files: the best one, and versions that are being evaluated."""
        best = await self.evaluations.best()
        return await self.evaluations.under_way() | (set() if best is None else {best.version})

    async def evaluate(self, stop: asyncio.Event, verify: Callable[[], Awaitable[object]]) -> None:
        """Verify and evaluate the live version if it is due. If `stop` is set, leave this to the next start."""
        live = await self._core.store.versions.live()
        if self._config.tasks is None or not await self.evaluations.is_due(live, self._config.every_steps):
            return
        await verify()
        work, stopped = asyncio.create_task(self._evaluate(live)), asyncio.create_task(stop.wait())
        stopped.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
        finally:
            stopped.cancel()

    async def _evaluate(self, live: PolicyVersion) -> None:
        """Evaluate a version and store the result. If this fails, store the reason, so that training goes on."""
        version, step = live.version, live.step or 0
        await self.evaluations.begin(version, step)
        log.info("policy version %d is being evaluated on held-out tasks", version)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                found = await self._run(version)
        except StoreUnavailable:
            raise
        except Exception as error:
            late = f"the tasks were not done within {self._config.timeout_s:g} s (evaluation.timeout_s)"
            why = late if isinstance(error, TimeoutError) else str(error) or repr(error)
            is_fault = not isinstance(error, (LightningError, OSError))
            log.warning("policy version %d was not evaluated: %s", version, why, exc_info=is_fault)
            await self.evaluations.ended(version, error=why)
            return
        await self.evaluations.ended(version, **found)
        shown = {f"eval_{name}": found[name] for name in ("reward", "low", "high") if found[name] is not None}
        self._core.engine.trackers.report(shown | {"eval_step": step})
        log.info("policy version %d: held-out reward %.3f", version, found["reward"])

    async def _run(self, version: int) -> dict[str, Any]:
        """Run the held-out tasks with a version, each rollout as its own group. Return the result."""
        config, own = self._core.config, self._config
        assert own.tasks is not None
        if why_not := config.not_absolute([name for name, weight in config.trainer.training_weights.items() if weight]):
            raise ConfigError(why_not)
        tasks, row, found = read_tasks(own.tasks) * own.samples, EvalRow(str(version)), dict[str, Any]()
        view = ProgressView(Console(quiet=True, force_terminal=False))
        command = [*ALONE, *own.command] if config.run.executor == "local" else own.command
        runner, options = runner_for(config, command, (), view.say), run_options(config, 1, CONCURRENCY, "eval", None)
        async with programs(api := ApiClient.of(config, patience_s=60), runner, view):
            await evaluate(api, tasks, runner, options, [row], view, promote=False)
            require_success(row.results)
            if (first := await self.evaluations.first()) is not None:
                compared = await api.request("GET", f"/policy/compare?a={first}&b={version}&mode=eval")
                low, high = compared["interval"] or (None, None)
                found = {"difference": compared["difference"], "difference_low": low, "difference_high": high}
        reward = (await self._core.store.versions.rewards([version])).get(("eval", version))
        if reward is None:
            raise LightningError("no held-out rollout has a reward")
        return found | {"reward": reward.mean, "low": reward.low, "high": reward.high}
