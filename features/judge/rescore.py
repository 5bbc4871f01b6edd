"""Asks a rewarder about recorded rollouts, and posts its answers as rewards."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from ...commands.api_client import ApiClient
from ...commands.formats import progress_bar
from ...commands.show.find import PAGE, checked, since_of
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from .ask import opened, read_rollouts, say_price
from .process import Function
from .results import RescoredRollout, ResultFile, failed_in
from .rewarder import Away, Given, Rewarder, within
from .summary import show

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line. `failed`: a results file; only its failed rollouts are scored again."""

    filters: dict[str, Any]
    rewarder: str = "function"
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
    """Run the command. Raise ConfigError for a wrong option; exit with 1 if the rewarder failed."""
    if options.rewarder == "function" and config.rewards.function is None:
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
    async with opened(config, options.rewarder) as (rewarder, _):
        try:
            if isinstance(rewarder, Function):
                await _require(config, rewarder, force=options.force)
            with ResultFile(options.out) as results:
                async with ApiClient.of(config, patience_s=PATIENCE_S) as api:
                    await _Work(config, options, api, rewarder, outcome, results.add).run()
        except Away as error:
            what = config.rewards.function if isinstance(rewarder, Function) else rewarder.label
            raise ConfigError(f"{what}: {error}") from None


async def _require(config: Config, function: Function, *, force: bool) -> None:
    """Raise ConfigError if the function does not declare that it needs the record alone; Away."""
    if not (await function.load()).from_record and not force:
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
        rewarder: Rewarder,
        outcome: Outcome,
        on_scored: Callable[[RescoredRollout], None],
    ) -> None:
        self._rewards = config.rewards
        self._rewarder = rewarder
        self._options = options
        self._api = api
        self._outcome = outcome
        self._on_scored = on_scored

    async def run(self) -> None:
        groups = await self._groups()
        await say_price(self._api, self._rewarder, groups)
        with progress_bar() as progress:
            bar = progress.add_task("rollouts", total=sum(map(len, groups)))
            left = iter(groups)

            async def worker() -> None:
                for group in left:
                    await self._score_together(group)
                    progress.advance(bar, len(group))

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._rewarder.at_once):
                        workers.create_task(worker())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _groups(self) -> list[list[str]]:
        """Ids of rollouts whose rewards are posted together: those of a task where they are compared, or retrained.

        With `retrain`, so that none is early.
        """
        wanted = None if self._options.failed is None else failed_in(self._options.failed)
        tasks: dict[str, list[str]] = defaultdict(list)
        alone: list[list[str]] = []
        filters = self._options.filters | {"since": since_of(self._options.filters["since"]), "status": "completed"}
        async with aclosing(self._api.every_rollout(PAGE, **filters)) as rollouts:
            async for rollout in rollouts:
                rollout_id, task = rollout["rollout_id"], rollout["task_id"]
                if wanted is not None and rollout_id not in wanted:
                    continue
                if (self._options.retrain or self._rewarder.in_groups) and task is not None:
                    tasks[task].append(rollout_id)
                else:
                    alone.append([rollout_id])
        return [*tasks.values(), *alone]

    async def _score_together(self, group: list[str]) -> None:
        parts = [group] if self._rewarder.in_groups else [[rollout_id] for rollout_id in group]
        scored = [one for part in parts for one in await self._score(part)]
        posts = [
            {"rollout_id": one.rollout_id, "call_id": score.call_id, "name": score.name or self._rewarder.name,
             "reward": score.value, "source": given.source, "comment": score.comment, "final": False,
             "retrain": self._options.retrain}
            for one, given in scored for score in given.scores
        ]  # fmt: skip
        if posts:
            await self._api.request("POST", "/reward", posts)
        for one, _ in scored:
            self._outcome.scored.append(one)
            self._on_scored(one)

    async def _score(self, rollout_ids: list[str]) -> list[tuple[RescoredRollout, Given]]:
        """What rollouts are given; nothing for those that have this version's rewards already, or were deleted."""
        rollouts, source = await read_rollouts(self._api, rollout_ids), await self._rewarder.source()
        known = {one["rollout_id"] for one in rollouts if any(r["source"] == source for r in one["rewards"])}
        if self._options.again:
            known = set()
        self._outcome.there_before += len(known)
        if len(known) == len(rollouts):
            return []
        found = []
        for rollout, unchecked in zip(rollouts, await self._rewarder.reward(rollouts), strict=True):
            if rollout["rollout_id"] not in known:
                given = within(unchecked, self._rewarder.name, self._rewards)
                before = {one["name"]: one["reward"] for one in rollout["rewards"] if one["call_id"] is None}
                values: dict[str, float] = defaultdict(float)
                for score in given.scores:
                    values[score.name or self._rewarder.name] += score.value
                one = RescoredRollout(
                    rollout["rollout_id"], rollout["task_id"], before, dict(values), given.source, given.error
                )
                found.append((one, given))
        return found
