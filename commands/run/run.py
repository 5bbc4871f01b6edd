"""Runs an agent program once per task and sibling, against a running proxy."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...client.program import names_of
from ...core.errors import LightningError
from ...core.records import Mode
from ..api_client import ApiClient, ApiError, OpenRollout
from ..command_line import variables
from .limits import Observer
from .output import last_line
from .runner import Runner, RunTimedOut, ServerDied
from .tasks import Task

SCORE_POLL_S, SCORE_POLL_MOST_S = 0.2, 5.0  # at first, and later
LOST = -9  # the exit code of a run that lost its machine or server, as if it had been killed
MOST_UNSCORED = 64  # rollouts that await their rewards while others begin, or four groups
CONFLICT = 409
LATE = 124  # that of a program that ran for too long, as of timeout(1)


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The outcome of one run of the program. `reward` is None until a reward has arrived.

    `answers` maps each requested model to the policy versions that answered, in order. A version is None for a model
    outside the policy. `tokens`: how many were sampled. `calls`: how many were recorded, whatever their status.
    `named`: rewards with names other than `reward`, such as the seats of a game. `usd`: the cost of its calls.
    """

    rollout_id: str
    task_id: str
    exit_code: int
    reason: str | None
    reward: float | None
    answers: Mapping[str | None, tuple[int | None, ...]] = field(default_factory=dict)
    tokens: int = 0
    calls: int = 0
    named: Mapping[str, float] = field(default_factory=dict)
    usd: float = 0.0

    @property
    def policy_versions(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(version for versions in self.answers.values() for version in versions))

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


def require_success(results: Sequence[RolloutResult]) -> None:
    """Raise LightningError, with the first program's reason, if every program failed."""
    if all(result.failed for result in results):
        raise LightningError(f"every program failed; first failure: {results[0].reason}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The siblings per task, the number of programs at once, and the directory that keeps their output, if any.

    `choice`: `policy_version` or `model` for POST /rollouts, to answer rollouts with something other than the live
    version. `score_timeout_s`: how long to wait for a reward that the proxy gives; None: it gives none.
    `timeout_s`: how long each program may run; None: no limit.
    """

    group_size: int = 1
    concurrency: int = 1
    mode: Mode = "train"
    logs: Path | None = None
    choice: Mapping[str, Any] = field(default_factory=dict)
    score_timeout_s: float | None = None
    timeout_s: float | None = None


async def run_tasks(
    api: ApiClient,
    tasks: Iterable[Task],
    runner: Runner,
    options: RunOptions,
    on_result: Callable[[RolloutResult], None] = lambda _: None,
    *observers: Observer,
) -> list[RolloutResult]:
    """Run the agent program for every task and sibling. `tasks` may be endless.

    If the run is cancelled or fails, the programs are stopped and their rollouts discarded.
    """
    with tempfile.TemporaryDirectory(prefix="lightning-run-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        return await _TaskRun(api, runner, options, logs, on_result, observers).run(tasks)


class _TaskRun:
    """Opens rollouts group by group and keeps `concurrency` programs running."""

    def __init__(
        self, api: ApiClient, runner: Runner, options: RunOptions, logs: Path,
        on_result: Callable[[RolloutResult], None], observers: Sequence[Observer],
    ) -> None:  # fmt: skip
        self.api, self.runner, self.options, self.logs = api, runner, options, logs
        self.on_result, self.observers = on_result, observers
        self.running = asyncio.Semaphore(options.concurrency)
        size = options.group_size
        # Single rollouts may wait for siblings that are still to begin, however many.
        most = max(MOST_UNSCORED, options.concurrency, 4 * size) if size > 1 else sys.maxsize
        self.unscored = asyncio.Semaphore(most)
        self.open: set[str] = set()
        self.results: list[RolloutResult] = []

    async def run(self, tasks: Iterable[Task]) -> list[RolloutResult]:
        jobs = self.jobs(tasks)
        try:
            async with aclosing(jobs), asyncio.TaskGroup() as programs:
                while True:
                    await self.running.acquire()
                    if (job := await anext(jobs, None)) is None:
                        break
                    programs.create_task(self.work(*job))
        except* Exception as errors:
            raise errors.exceptions[0] from None
        finally:
            with suppress(ApiError):  # the proxy is gone, too
                await asyncio.gather(*(self.end(name, "discarded", "the run was stopped") for name in self.open))
        return self.results

    async def jobs(self, tasks: Iterable[Task]) -> AsyncGenerator[tuple[Task, OpenRollout], None]:
        """Yield the runs to do. A group is opened only when its first sibling can start."""
        for task in tasks:
            for observer in self.observers:
                if not await observer.wait():
                    return
            for rollout in await self.opened(task):
                yield task, rollout

    async def opened(self, task: Task) -> list[OpenRollout]:
        """Open the siblings that a task still lacks."""
        sibling_of = task.siblings[0] if task.siblings else None
        join = {} if sibling_of is None else {"sibling_of": sibling_of}
        missing = self.options.group_size - len(task.siblings)
        asked = self.api.open_rollouts(task.task_id, self.options.mode, missing, **join, **self.options.choice)
        opening = asyncio.ensure_future(asked)
        try:
            group = await asyncio.shield(opening)
        finally:  # also where it is cancelled: they are there, and are discarded
            rollout_ids = [rollout.rollout_id for rollout in await opening]
            self.open.update(rollout_ids)
        for observer in self.observers:
            observer.opened(rollout_ids, sibling_of)
        return group

    async def work(self, task: Task, rollout: OpenRollout) -> None:
        """Run the program for a rollout, wait for the reward if the proxy gives one, and report the result."""
        name = rollout.rollout_id
        try:
            code, reason = await self.run_program(task, rollout)
            if reason is not None:
                await self.end(name, "failed", reason)
            elif self.options.score_timeout_s is not None:
                await self.end(name, "completed", "the program ended")
            found = await self.api.rollout(name)
            self.open.remove(name)
            for observer in self.observers:
                observer.ended(found)
            await self.unscored.acquire()
        finally:
            self.running.release()
        try:
            if code == 0:
                found = await self.scored(found)
        finally:
            self.unscored.release()
        self.results.append(result_of(found, code, reason))
        self.on_result(self.results[-1])

    async def run_program(self, task: Task, rollout: OpenRollout) -> tuple[int, str | None]:
        """Run the program to its end. Return its exit code and, if it failed, the reason."""
        limit_s, log = self.options.timeout_s, self.logs / f"{rollout.rollout_id}.log"
        env = names_of(self.api.url, rollout.base_url, rollout.api_key, rollout.rollout_id)
        env |= {"LIGHTNING_TASK": task.line, **variables(self.api.url, rollout)}
        try:
            code = await self.runner.run(env, log, limit_s)
            return code, f"exit code {code}: {last_line(log)}" if code else None
        except RunTimedOut:
            return LATE, f"ended after {limit_s:g} s (run.timeout_s): {last_line(log)}"
        except ServerDied as error:
            return LOST, error.message
        finally:
            if self.options.logs is None:
                log.unlink(missing_ok=True)

    async def scored(self, rollout: dict[str, Any]) -> dict[str, Any]:
        """Return the rollout, with its reward if the proxy has scored it in time."""
        until, pause_s = time.monotonic() + (self.options.score_timeout_s or 0), SCORE_POLL_S
        while rollout.get("awaits_reward") and time.monotonic() < until:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, SCORE_POLL_MOST_S)
            rollout = await self.api.rollout(rollout["rollout_id"])
        return rollout

    async def end(self, name: str, status: str, reason: str) -> None:
        try:
            await self.api.end_rollout(name, status, reason)
        except ApiError as error:
            if error.status_code != CONFLICT:  # it was complete: its reward had arrived before the program failed
                raise


def result_of(rollout: Mapping[str, Any], code: int = 0, reason: str | None = None) -> RolloutResult:
    answers: dict[str | None, dict[int | None, None]] = {}
    for call in rollout.get("calls", ()):
        if call["status"] == "ok":  # it has several versions if weights were replaced during it
            model = call["request"].get("model") if isinstance(call["request"], dict) else None
            versions = dict.fromkeys(call["policy_versions"] or [None])
            answers.setdefault(model if isinstance(model, str) else None, {}).update(versions)
    own = [one for one in rollout.get("rewards", ()) if one["call_id"] is None and one["name"] != "reward"]
    return RolloutResult(
        rollout["rollout_id"],
        rollout["task_id"],
        code,
        reason,
        rollout["reward"],
        answers={model: tuple(versions) for model, versions in answers.items()},
        tokens=rollout.get("tokens", 0),
        calls=len(rollout.get("calls", ())),
        named={one["name"]: one["reward"] for one in own},
        usd=rollout.get("costs", {}).get("usd", 0.0),
    )
