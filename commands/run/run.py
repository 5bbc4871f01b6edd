"""Runs an agent program once per task and sibling, against a running proxy."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import LightningError
from ...core.records import Mode
from ..api_client import ApiClient, ApiError, OpenRollout
from ..command_line import variables
from .journal import Journal
from .limits import BacklogGate, Budget
from .output import last_line
from .runner import RunLost, Runner, RunTimedOut, ServerDied
from .tasks import Task

CONFLICT = 409
SCORE_POLL_S = 0.2  # at first; later, and the more rollouts wait, the less often
SCORE_POLL_MOST_S = 5.0
SCORE_POLLS = 8  # rollouts that are looked at in this time
RESTARTS = 3  # of a run whose machine goes away
LOST = -9  # the exit code of a run whose machine or server went away, as if it had been killed
MOST_UNSCORED = 64  # rollouts that await their rewards while others begin, or four groups
OnOpen = Callable[[Sequence[str], str | None], None]  # rollouts that were opened, and one that was of their group
LATE = 124  # that of a program that ran for too long, as of timeout(1)


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The outcome of one run of the program. `reward` is None while no reward of the rollout has arrived.

    `answers` maps each model that was asked for to the policy versions that answered, in order. A version is None for
    a model outside the policy. `tokens`: how many were sampled. `calls`: how many were recorded, of whatever status.
    `restarts`: how often its machine went away and the task was begun anew, in another rollout. `named`: its rewards of
    other names, such as those of a game's seats. `usd`: what its calls cost.
    """

    rollout_id: str
    task_id: str
    exit_code: int
    reason: str | None
    reward: float | None
    answers: Mapping[str | None, tuple[int | None, ...]] = field(default_factory=dict)
    tokens: int = 0
    calls: int = 0
    restarts: int = 0
    named: Mapping[str, float] = field(default_factory=dict)
    usd: float = 0.0

    @property
    def policy_versions(self) -> tuple[int | None, ...]:
        """Return all versions that answered its calls."""
        return tuple(dict.fromkeys(version for versions in self.answers.values() for version in versions))

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


def require_success(results: Sequence[RolloutResult]) -> None:
    """Raise LightningError if every program failed; it has the reason of the first."""
    if all(result.failed for result in results):
        raise LightningError(f"every program failed, the first with {results[0].reason}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The siblings per task, the programs at once, and the directory of their output (None: thrown away).

    `choice` is `policy_version` or `model` of POST /rollouts, if not the live version answers the rollouts.
    `score_timeout_s`: a function of the proxy gives the rewards, in about this time; None: somebody posts them.
    `timeout_s`: how long each program may run; None: as long as it likes.
    """

    group_size: int = 1
    concurrency: int = 1
    mode: Mode = "train"
    logs: Path | None = None
    choice: Mapping[str, Any] = field(default_factory=dict)
    score_timeout_s: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One run to come: a task and the rollout opened for it."""

    task: Task
    rollout: OpenRollout


class TaskRun:
    """Opens rollouts group by group and keeps `concurrency` programs running."""

    def __init__(
        self,
        api: ApiClient,
        runner: Runner,
        options: RunOptions,
        on_result: Callable[[RolloutResult], None] = lambda _: None,
        gate: BacklogGate | None = None,
        budget: Budget | None = None,
        on_open: OnOpen = lambda _, __: None,
    ) -> None:
        self._api, self._runner, self._options = api, runner, options
        self._on_result, self._on_open, self._gate = on_result, on_open, gate or BacklogGate()
        self._budget = budget or Budget(None)
        self._opened: dict[str, OpenRollout] = {}
        self._unscored, self._scored_one = 0, asyncio.Event()
        self._results: list[RolloutResult] = []

    async def run(self, tasks: Iterable[Task]) -> list[RolloutResult]:
        """Run all tasks. When it is cancelled, it stops the programs and discards their rollouts."""
        jobs, turn = self._jobs(tasks), asyncio.Lock()
        self._journal = Journal(self._api.url)
        with tempfile.TemporaryDirectory(prefix="lightning-run-") as scratch:
            logs = self._options.logs or Path(scratch)
            logs.mkdir(parents=True, exist_ok=True)
            try:
                async with contextlib.aclosing(jobs), asyncio.TaskGroup() as workers:
                    for _ in range(self._options.concurrency):
                        workers.create_task(self._work(jobs, turn, logs, workers))
            except* LightningError as errors:
                raise errors.exceptions[0] from None
            finally:
                await self._discard_open()
                self._journal.close(keep=bool(self._opened))
        return self._results

    async def _jobs(self, tasks: Iterable[Task]) -> AsyncGenerator[Job, None]:
        # A group is opened only when its first sibling can start.
        for task in tasks:
            if self._budget.is_spent:
                self._budget.left_out = True
                return
            for job in await self._open(task):
                yield job

    async def _open(self, task: Task) -> list[Job]:
        await self._gate.wait()
        options = self._options  # a single one's siblings may be still to begin
        most = max(MOST_UNSCORED, options.concurrency, 4 * options.group_size)
        while options.group_size > 1 and self._unscored >= most:
            self._scored_one.clear()
            await self._scored_one.wait()
        join = {"sibling_of": task.siblings[0]} if task.siblings else {}
        missing = options.group_size - len(task.siblings)
        group = await self._api.open_rollouts(task.task_id, options.mode, missing, **join, **options.choice)
        rollout_ids = [rollout.rollout_id for rollout in group]
        self._opened.update(zip(rollout_ids, group, strict=True))
        self._journal.opened(rollout_ids)
        self._on_open(rollout_ids, join.get("sibling_of"))
        self._gate.opened(rollout_ids)
        return [Job(task, rollout) for rollout in group]

    async def _work(
        self, jobs: AsyncGenerator[Job, None], turn: asyncio.Lock, logs: Path, workers: asyncio.TaskGroup
    ) -> None:
        while True:
            async with turn:
                job = await anext(jobs, None)
            if job is None:
                return
            ended = self._conclude(*await self._run_one(job, logs))
            if self._options.score_timeout_s is None:
                await ended
            else:  # its reward may wait for siblings that are still to begin
                workers.create_task(ended)

    async def _conclude(self, job: Job, code: int, reason: str | None, restarts: int) -> None:
        result = await self._ended(job, code, reason, restarts)
        del self._opened[result.rollout_id]
        self._journal.ended(result.rollout_id)
        self._gate.ended(result.rollout_id)
        self._results.append(result)
        self._on_result(result)

    async def _run_one(self, job: Job, logs: Path) -> tuple[Job, int, str | None, int]:
        """Run the program until it ends. If its machine goes away, begin anew in another rollout."""
        lost: list[str] = []
        while True:
            name, log = job.rollout.rollout_id, logs / f"{job.rollout.rollout_id}.log"
            try:
                limit = () if self._options.timeout_s is None else (self._options.timeout_s,)
                code = await self._runner.run(self._environment(job), log, *limit)
                reason = f"exit code {code}: {last_line(log)}" if code else None
            except RunTimedOut:
                code = LATE
                reason = f"ended after {self._options.timeout_s:g} s (run.timeout_s): {last_line(log)}"
            except ServerDied as error:
                code, reason = LOST, error.message
            except RunLost as error:
                code, reason = LOST, error.message
                if len(lost) < RESTARTS and (await self._api.rollout(name))["status"] == "running":
                    job = await self._replaced(job)
                    lost.append(name)
                    continue
            finally:
                if self._options.logs is None:
                    log.unlink(missing_ok=True)
            # Not earlier: a discarded rollout counts as a sibling that the trainer need not wait for.
            for earlier in lost:
                await self._end(earlier, "discarded", "its machine went away; the task was begun anew")
                await self._budget.count(self._api, await self._api.rollout(earlier))
                del self._opened[earlier]
                self._journal.ended(earlier)
            return job, code, reason, len(lost)

    async def _replaced(self, job: Job) -> Job:
        """Return the same task with a new rollout: the old one has calls of a run that never ended."""
        options, old = self._options, job.rollout.rollout_id
        join = {"sibling_of": old, **options.choice}
        (rollout,) = await self._api.open_rollouts(job.task.task_id, options.mode, 1, **join)
        self._opened[rollout.rollout_id] = rollout
        self._journal.opened([rollout.rollout_id])
        self._on_open([rollout.rollout_id], old)
        self._gate.ended(old)
        self._gate.opened([rollout.rollout_id])
        return Job(job.task, rollout)

    async def _ended(self, job: Job, code: int, reason: str | None, restarts: int) -> RolloutResult:
        rollout_id = job.rollout.rollout_id
        if reason is not None:
            await self._end(rollout_id, "failed", reason)
        rollout = await (self._scored(rollout_id) if code == 0 else self._api.rollout(rollout_id))
        await self._budget.count(self._api, rollout)
        return result_of(rollout_id, job.task.task_id, rollout, code, reason, restarts)

    def _environment(self, job: Job) -> dict[str, str]:
        url = job.rollout.base_url
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,  # what llama-index reads
            "OPENAI_API_KEY": job.rollout.api_key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # Anthropic's client adds it
            "ANTHROPIC_API_KEY": job.rollout.api_key,
            "LIGHTNING_ROLLOUT_ID": job.rollout.rollout_id,
            "LIGHTNING_TASK": job.task.line,  # the runner puts it into a file, too
            "LIGHTNING_URL": self._api.url,
            **variables(self._api.url, job.rollout),
        }

    async def _scored(self, rollout_id: str) -> dict[str, Any]:
        """The rollout whose program has ended well; with its reward, if a function gives it and is not late."""
        limit_s = self._options.score_timeout_s
        if limit_s is not None:
            await self._end(rollout_id, "completed", "the program ended")
        rollout, until = await self._api.rollout(rollout_id), time.monotonic() + (limit_s or 0)
        pause_s, self._unscored = SCORE_POLL_S, self._unscored + 1
        try:
            while rollout.get("awaits_reward") and time.monotonic() < until:
                await asyncio.sleep(pause_s * max(1.0, self._unscored / SCORE_POLLS))
                pause_s = min(1.5 * pause_s, SCORE_POLL_MOST_S)
                rollout = await self._api.rollout(rollout_id)
        finally:
            self._unscored -= 1
            self._scored_one.set()
        return rollout

    async def _end(self, rollout_id: str, status: str, reason: str) -> None:
        try:
            await self._api.end_rollout(rollout_id, status, reason)
        except ApiError as error:
            # The rollout was complete: its reward had arrived before the program failed.
            if error.status_code != CONFLICT:
                raise

    async def _discard_open(self) -> None:
        # If the proxy is gone as well, the rollouts stay open until the next `run` fails them.
        with contextlib.suppress(ApiError):
            await asyncio.gather(*(self._end(name, "discarded", "run was stopped") for name in self._opened))
            self._opened.clear()


async def run_tasks(
    api: ApiClient,
    tasks: Iterable[Task],
    runner: Runner,
    options: RunOptions,
    on_result: Callable[[RolloutResult], None] = lambda _: None,
    gate: BacklogGate | None = None,
    budget: Budget | None = None,
    on_open: OnOpen = lambda _, __: None,
) -> list[RolloutResult]:
    """Run the agent program for every task and sibling. `tasks` may never end."""
    return await TaskRun(api, runner, options, on_result, gate, budget, on_open).run(tasks)


def result_of(
    rollout_id: str,
    task_id: str,
    rollout: Mapping[str, Any],
    code: int = 0,
    reason: str | None = None,
    restarts: int = 0,
) -> RolloutResult:
    """Return the result of a rollout, as the proxy has it."""
    calls, tokens = rollout.get("calls", []), rollout.get("tokens", 0)
    named = {one["name"]: one["reward"] for one in rollout.get("rewards", ()) if one["call_id"] is None}
    named.pop("reward", None)
    end = (code, reason, rollout["reward"], _answers(calls))
    usd = rollout.get("costs", {}).get("usd", 0.0)
    return RolloutResult(rollout_id, task_id, *end, tokens, len(calls), restarts, named, usd)


def _answers(calls: Iterable[Mapping[str, Any]]) -> dict[str | None, tuple[int | None, ...]]:
    """The versions that answered, by the requested model. A call has several if weights were replaced during it."""
    found: dict[str | None, dict[int | None, None]] = {}
    for call in calls:
        if call["status"] == "ok":
            model = call["request"].get("model") if isinstance(call["request"], dict) else None
            versions = dict.fromkeys(call["policy_versions"] or [None])
            found.setdefault(model if isinstance(model, str) else None, {}).update(versions)
    return {model: tuple(versions) for model, versions in found.items()}
