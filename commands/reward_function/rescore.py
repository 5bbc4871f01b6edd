"""Asks a reward function about recorded rollouts, and posts its answers as rewards."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import typer

from ...proxy.config.root import Config
from ...proxy.errors import ConfigError
from ...proxy.reward_function.process import FunctionProcess, NoReward, NotLoaded, source_of
from ...proxy.store.requests.full import full_calls
from ..api_client import ApiClient, ApiError
from ..formats import progress_bar
from ..show.listing import PAGE, checked, since_of
from ..signals import run_until_signal
from .results import RescoredRollout, ResultFile, failed_in
from .summary import show

GONE = 404
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line. `failed`: a results file; only its failed rollouts are scored again."""

    filters: dict[str, Any]
    failed: Path | None = None
    out: Path | None = None
    again: bool = False
    force: bool = False
    retrain: bool = False


@dataclass(slots=True)
class Outcome:
    """The result: the rollouts that were scored, and how many had this version's reward before."""

    scored: list[RescoredRollout] = field(default_factory=list)
    there_before: int = 0


def rescore_command(config: Config, options: Options, *, as_json: bool) -> None:
    """Run the command. Raise ConfigError for a wrong option; exit with 1 if the function failed."""
    if config.rewards.function is None:
        raise ConfigError("name the reward function: --reward FILE.py:NAME, or rewards.function")
    checked(options.filters["mode"], None)
    outcome, finished = Outcome(), False
    try:
        run_until_signal(_run(config, options, outcome))
        finished = True
    finally:
        if finished or outcome.scored:
            show(outcome.scored, outcome.there_before, config.trainer.reward_weights, as_json=as_json)
    if any(one.error is not None for one in outcome.scored):
        raise typer.Exit(1)


async def _run(config: Config, options: Options, outcome: Outcome) -> None:
    processes = [FunctionProcess(config.rewards) for _ in range(config.rewards.processes)]
    try:
        await _require(config, processes[0], force=options.force)
        with ResultFile(options.out) as results:
            async with ApiClient.of(config, patience_s=PATIENCE_S) as api:
                await _Work(config, options, api, processes, outcome, results.add).run()
    except NotLoaded as error:
        raise ConfigError(f"{config.rewards.function}: {error}") from None
    finally:
        for process in processes:
            await process.close()


async def _require(config: Config, process: FunctionProcess, *, force: bool) -> None:
    """Raise ConfigError if the function does not declare that it needs the record alone; NotLoaded."""
    if not (await process.start()).from_record and not force:
        name = config.rewards.name
        raise ConfigError(
            f"{config.rewards.function} does not say that it needs the record alone: write `{name}.from_record = True` "
            "below it if it looks at nothing that has changed since, or give --force"
        )


class _Work:
    """One run: lists the rollouts, scores each, and posts the rewards."""

    def __init__(
        self,
        config: Config,
        options: Options,
        api: ApiClient,
        processes: list[FunctionProcess],
        outcome: Outcome,
        on_scored: Callable[[RescoredRollout], None],
    ) -> None:
        self._config = config.rewards
        self._options = options
        self._api = api
        self._outcome = outcome
        self._on_scored = on_scored
        self._free: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        for process in processes:
            self._free.put_nowait(process)

    async def run(self) -> None:
        groups = await self._groups()
        with progress_bar() as progress:
            bar = progress.add_task("rollouts", total=sum(map(len, groups)))
            left = iter(groups)

            async def worker() -> None:
                for group in left:
                    await self._score_together(group)
                    progress.advance(bar, len(group))

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._free.qsize()):
                        workers.create_task(worker())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _groups(self) -> list[list[str]]:
        """Ids of rollouts whose rewards are posted together: with `retrain`, those of a task, so that none is early."""
        wanted = None if self._options.failed is None else failed_in(self._options.failed)
        tasks: dict[str, list[str]] = defaultdict(list)
        alone: list[list[str]] = []
        async with aclosing(self._listed()) as rollouts:
            async for rollout in rollouts:
                rollout_id, task = rollout["rollout_id"], rollout["task_id"]
                if wanted is not None and rollout_id not in wanted:
                    continue
                if self._options.retrain and task is not None:
                    tasks[task].append(rollout_id)
                else:
                    alone.append([rollout_id])
        return [*tasks.values(), *alone]

    async def _listed(self) -> AsyncGenerator[dict[str, Any]]:
        filters = self._options.filters | {"since": since_of(self._options.filters["since"]), "status": "completed"}
        cursor = None
        while True:
            page = await self._api.rollouts(**filters, limit=PAGE, cursor=cursor)
            for rollout in page["data"]:
                yield rollout
            if (cursor := page["next_cursor"]) is None:
                return

    async def _score_together(self, group: list[str]) -> None:
        scored = [one for rollout_id in group if (one := await self._score(rollout_id)) is not None]
        posts = [
            {"rollout_id": one.rollout_id, "name": name, "reward": value, "source": one.source, "final": False,
             "retrain": self._options.retrain}
            for one in scored for name, value in one.values.items()
        ]  # fmt: skip
        if posts:
            await self._api.request("POST", "/reward", posts)
        for one in scored:
            self._outcome.scored.append(one)
            self._on_scored(one)

    async def _score(self, rollout_id: str) -> RescoredRollout | None:
        """The function's rewards of a rollout; None if it has this version's already, or was deleted."""
        try:
            rollout = await self._api.rollout(quote(rollout_id, safe=""))
        except ApiError as error:
            if error.status_code == GONE:
                return None
            raise
        process = await self._free.get()
        try:
            source = source_of(self._config, (await process.start()).version)
            if not self._options.again and any(reward["source"] == source for reward in rollout["rewards"]):
                self._outcome.there_before += 1
                return None
            before = {reward["name"]: reward["reward"] for reward in rollout["rewards"] if reward["call_id"] is None}
            made = partial(RescoredRollout, rollout_id, rollout["task_id"], before)
            try:
                judgement = await process.ask(orjson.dumps(rollout | {"calls": full_calls(rollout["calls"])}))
            except NoReward as error:
                return made({}, source, str(error))
            return made(judgement.values, source_of(self._config, judgement.version), None)
        finally:
            self._free.put_nowait(process)
