"""Evaluates new versions on held-out tasks beside training (`evaluation`). What is owed is read off the store.

`lightning-proxy eval` runs as a process of its own, and begins a rollout whenever it is allowed to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ...core.errors import LightningError, StoreUnavailable
from ...core.records import PolicyVersion
from ...core.statistics import bootstrap_mean
from ...store.store import Store
from ...trainer.plugins import TrainerCore
from ...trainer.types import BackgroundWork
from ...trainer.waiting import Stopped, pause
from .config import EvaluationConfig
from .evaluations import Evaluations, HeldOut

log = logging.getLogger(__name__)
LOOK_S = 0.5
QUIET_S = 60.0  # a rollout that has called nothing for so long holds no evaluation up
SHARE = 0.5  # of `timeout_s`, over which an evaluation is spread while agents work
CONCURRENCY = 4
NICE = 10  # agents' programs and the trainer have the processors first
GRACE_S = 10.0  # to discard its rollouts
TRACKED = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID")  # say which run is the trainer's: no agent goes on with it


class Owed(NamedTuple):
    """A version that is to be evaluated, and the step that made it (0: the base model)."""

    version: int
    step: int


class BestVersion(BackgroundWork):
    """Knows the best version, whoever evaluated it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.evaluations = Evaluations(store)

    async def keep(self) -> set[int]:
        best = await self.evaluations.best()
        return await self.evaluations.under_way() | (set() if best is None else {best.version})


class Evaluator(BestVersion):
    """Evaluates the live version every so many steps. Merged weights stay live until that is done."""

    def __init__(self, core: TrainerCore) -> None:
        super().__init__(core.store)
        assert core.swap is not None
        self._config, self._trackers = core.config.section(EvaluationConfig), core.engine.trackers
        self._merged = core.swap.mode == "merged"
        self._process = EvalProcess(self._config, core.run.file, core.config.policy.directory)
        self._ended = asyncio.Event()
        self._runs = False  # fine-tuning publishes without it

    async def run(self) -> None:
        self._runs = True
        working, ended = asyncio.ensure_future(self._work()), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for one in (working, ended):
                one.cancel()
            await asyncio.gather(working, ended, return_exceptions=True)

    async def finish(self, stop: asyncio.Event) -> None:
        while not stop.is_set() and await self._may_owe():
            await pause(stop, LOOK_S)
        self._ended.set()

    async def before_publishing(self, stop: asyncio.Event) -> None:
        while self._runs and self._merged and await self.owed() is not None:
            await pause(stop, LOOK_S)
            if stop.is_set():
                raise Stopped

    async def owed(self) -> Owed | None:
        """Return the live version if it is to be evaluated: none was before, or `every_steps` were taken since."""
        live = await self._store.versions.live()
        last, own = await self.evaluations.last(), await self.evaluations.of(live.version)  # it may begin in between
        if own is not None:
            return None if own.ended_at is not None else _owed(live)
        is_due = last is None or (live.step or 0) - last.step >= self._config.every_steps
        return _owed(live) if is_due else None

    async def _may_owe(self) -> bool:
        try:
            return await self.owed() is not None
        except StoreUnavailable:
            return True

    async def _work(self) -> None:
        while True:
            try:
                await self._evaluate_new()
            except StoreUnavailable as error:
                log.error("evaluations wait: %s", error)
                await asyncio.sleep(LOOK_S)

    async def _evaluate_new(self) -> None:
        await self.evaluations.forget_broken_off((await self._store.versions.live()).version)
        while True:
            if (owed := await self.owed()) is None:
                await asyncio.sleep(LOOK_S)
            else:
                await self._evaluate(owed)

    async def _evaluate(self, owed: Owed) -> None:
        """Evaluate a version, and keep the result or why there is none."""
        await self.evaluations.begin(*owed)
        log.info("policy version %d is evaluated on held-out tasks", owed.version)
        try:
            await self._keep_result(owed, await self._process.run(owed.version, self._pace()))
        except (NotEvaluated, OSError) as error:
            log.warning("policy version %d is not evaluated: %s", owed.version, error)
            await self.evaluations.failed(owed.version, str(error))

    def _pace(self) -> Callable[[], Awaitable[None]]:
        """Return what waits before each rollout while agents work, but not beyond its place in an even spread."""
        assert self._config.tasks is not None
        lines = self._config.tasks.read_bytes().split(b"\n")
        rollouts = self._config.samples * sum(bool(line.strip()) for line in lines)
        began, begun = time.monotonic(), count()

        async def allowed() -> None:
            until = began + latest_s(self._config.timeout_s, next(begun), rollouts)
            while time.monotonic() < until and await self._agents_work():  # noqa: ASYNC110 - nothing tells of a pause
                await asyncio.sleep(LOOK_S)

        return allowed

    async def _agents_work(self) -> bool:
        try:
            return await self.evaluations.agents_work(time.time() - QUIET_S)
        except StoreUnavailable:
            return True

    async def _keep_result(self, owed: Owed, row: Mapping[str, Any]) -> None:
        by_task = {task: float(found["mean_reward"]) for task, found in row["by_task"].items()}
        low, high = row["interval"]["low"], row["interval"]["high"]
        found = HeldOut(
            *owed, 0.0, reward=row["mean_reward"], low=low, high=high, tasks=row["tasks"], rollouts=row["rollouts"],
            failed=row["failed"], **_beside(by_task, await self.evaluations.first()),
        )  # fmt: skip
        await self.evaluations.ended(found, by_task)
        numbers = {"eval_reward": found.reward, "eval_low": low, "eval_high": high, "eval_step": owed.step}
        self._trackers.report(numbers)
        log.info("policy version %d: held-out reward %.3f (%.3f to %.3f)", owed.version, found.reward or 0.0, low, high)


def latest_s(timeout_s: float, place: int, rollouts: int) -> float:
    """Return after how many seconds the rollout at `place` (from 0) of so many begins, however busy agents are.

    Of 10 rollouts in 600 s the first begins at once, and one every 30 s.
    """
    return SHARE * timeout_s * place / max(1, rollouts)


def _owed(version: PolicyVersion) -> Owed:
    return Owed(version.version, version.step or 0)


def _beside(by_task: Mapping[str, float], first: tuple[int, Mapping[str, float]] | None) -> dict[str, Any]:
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


class NotEvaluated(LightningError):
    """The command failed, or was not done in time."""


class EvalProcess:
    """Evaluates a version. The directory gets the command's log and its result."""

    def __init__(self, config: EvaluationConfig, file: Path | None, directory: Path) -> None:
        """`file`: the configuration's."""
        self._config, self._file = config, file
        self._log, self._out = directory / "evaluation.log", directory / "evaluation.json"

    def argv(self, version: int) -> Sequence[str]:
        config = ["--config", str(self._file)] if self._file is not None else []
        which = ["--tasks", str(self._config.tasks), "--models", str(version), "--samples", str(self._config.samples)]
        how = ["--concurrency", str(CONCURRENCY), "--out", str(self._out), "--paced", "--"]
        return [sys.executable, "-m", "lightning_proxy.cli", *config, "eval", *which, *how, *self._config.command]

    async def run(self, version: int, allowed: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        """Return the version's row of the result. It awaits `allowed` before each rollout. Raises NotEvaluated."""
        self._out.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in TRACKED}
        with self._log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self.argv(version), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=env, start_new_session=True,
            )  # fmt: skip
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        letting_in = asyncio.create_task(_let_in(process, allowed))
        try:
            async with asyncio.timeout(self._config.timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise NotEvaluated(f"it was not done after {self._config.timeout_s:g} s (evaluation.timeout_s)") from None
        finally:
            letting_in.cancel()
            await asyncio.gather(letting_in, return_exceptions=True)
            await asyncio.shield(_end(process))
        if code != 0 or not self._out.is_file():
            raise NotEvaluated(f"{self._last_line()} (exit code {code}); see {self._log}")
        row: dict[str, Any] = json.loads(self._out.read_text())["rows"][0]
        return row

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        return next((line[:300] for line in reversed(lines) if line), "no output")


async def _let_in(process: asyncio.subprocess.Process, allowed: Callable[[], Awaitable[None]]) -> None:
    """Let a rollout in when it is allowed, and while fewer than `CONCURRENCY` have begun and not ended."""
    assert process.stdin is not None and process.stdout is not None
    begun = 0
    with suppress(ConnectionError):
        while True:
            await allowed()
            process.stdin.write(b"\n")
            await process.stdin.drain()
            begun += 1
            if begun >= CONCURRENCY:
                await process.stdout.readline()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the command if it runs. It ends by itself, and discards its rollouts, when its input does."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(GRACE_S):
            await process.communicate()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
