"""Asks a rewarder about recorded rollouts, and posts its answers as rewards: `rescore`; what `rewards check` reads."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple
from urllib.parse import quote

import typer

from ...commands.api_client import ApiClient, ApiError
from ...commands.formats import number, print_json, progress_bar
from ...commands.show.find import PAGE, find, since_of
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...trainer.waiting import all_of
from .kinds import ModelRewarder, check, made, named
from .rewarder import Away, Given, Json, Rewarder
from .scoring import not_counted

PATIENCE_S = 60.0
SHOWN = 5
GONE = 404


class Rescored(NamedTuple):
    """A rollout: its rewards `before` and the new `values`, by name, with reasons; or the rewarder's `error`."""

    rollout_id: str
    before: dict[str, float]
    values: dict[str, float]
    comments: list[str]
    error: str | None


@dataclass(slots=True, kw_only=True)
class Rescore:
    """One run of the command, by its options. `ids`: these rollouts alone, as siblings.

    `there_before`: rollouts that have this version's rewards already.
    """

    config: Config
    ids: Sequence[str]
    task: str | None
    since: str | None
    rewarder: str
    again: bool
    retrain: bool
    dry_run: bool
    scored: list[Rescored] = field(default_factory=list)
    there_before: int = 0
    tokens: int = 0

    async def run(self) -> None:
        """Ask and post. Raise ConfigError if that cannot begin or go on."""
        async with (
            opened(self.config, self.rewarder) as rewarder,
            ApiClient.of(self.config, patience_s=PATIENCE_S) as api,
        ):
            groups, slots = await self._groups(api, rewarder), asyncio.Semaphore(rewarder.at_once)
            with progress_bar() as progress:
                bar = progress.add_task("rollouts", total=sum(map(len, groups)))

                async def score(group: list[str]) -> None:
                    async with slots:
                        await self._score(api, rewarder, group)
                    progress.advance(bar, len(group))

                try:
                    await all_of(map(score, groups))
                finally:
                    self.tokens = rewarder.model.tokens if isinstance(rewarder, ModelRewarder) else 0

    async def _groups(self, api: ApiClient, rewarder: Rewarder) -> list[list[str]]:
        """Ids of rollouts whose rewards are posted together: those of a task where they are compared, or retrained.

        With `retrain`, so that none is early.
        """
        if self.ids:
            return [[(await find(api, one))["rollout_id"] for one in self.ids]]
        groups = defaultdict[str, list[str]](list)
        filters: Json = {"task_id": self.task, "since": since_of(self.since), "status": "completed"}
        async with aclosing(api.every_rollout(PAGE, **filters)) as rollouts:
            async for one in rollouts:
                is_sibling = (self.retrain or rewarder.in_groups) and one["task_id"] is not None
                groups[f"task {one['task_id']}" if is_sibling else one["rollout_id"]].append(one["rollout_id"])
        return [*groups.values()]

    async def _score(self, api: ApiClient, rewarder: Rewarder, group: list[str]) -> None:
        """Ask about rollouts, without those that have this version's rewards already, and post all of it at once."""
        posts, scored = list[Json](), list[Rescored]()
        for part in [group] if rewarder.in_groups else [[rollout_id] for rollout_id in group]:
            rollouts, source = await read_rollouts(api, part), await rewarder.source()
            is_new = [
                self.again or self.dry_run or all(one["source"] != source for one in rollout["rewards"])
                for rollout in rollouts
            ]
            self.there_before += is_new.count(False)
            if not any(is_new):
                continue
            for rollout, given, new in zip(rollouts, await rewarder.reward(rollouts), is_new, strict=True):
                if new:
                    scored.append(_rescored(rollout, given))
                    posts += [
                        {"rollout_id": one.rollout_id, "call_id": one.call_id, "name": one.name, "reward": one.reward,
                         "source": one.source, "comment": one.comment, "final": False, "retrain": self.retrain}
                        for one in given.rewards
                    ]  # fmt: skip
        if posts and not self.dry_run:
            await api.request("POST", "/reward", posts)
        self.scored += scored


def _rescored(rollout: Json, given: Given) -> Rescored:
    before = {one["name"]: one["reward"] for one in rollout["rewards"] if one["call_id"] is None}
    values = dict.fromkeys((one.name for one in given.rewards), 0.0)
    for one in given.rewards:
        values[one.name] += one.reward
    comments = [one.comment for one in given.rewards if one.comment]
    return Rescored(rollout["rollout_id"], before, values, comments, given.error)


def rescore_command(work: Rescore, *, as_json: bool) -> None:
    """Run the command. Raise ConfigError for a wrong option; exit with 1 if the rewarder failed."""
    if work.rewarder == "function" and work.config.rewards.function is None:
        raise ConfigError("name the reward function: --reward FILE.py:NAME, or rewards.function")
    try:
        run_until_signal(work.run())
    except BaseException:
        if work.scored:
            show(work, as_json=as_json)
        raise
    show(work, as_json=as_json)
    if any(one.error is not None for one in work.scored):
        raise typer.Exit(1)


def changes(scored: Sequence[Rescored]) -> Iterator[Json]:
    """Yield for each reward's name how many got it, and its mean before, of those that had it, and after."""
    for name in sorted({name for one in scored for name in one.values}):
        given = [one for one in scored if name in one.values]
        before = [one.before[name] for one in given if name in one.before]
        after = fmean(one.values[name] for one in given)
        yield {"name": name, "rollouts": len(given), "mean_before": fmean(before) if before else None,
               "mean_after": after}  # fmt: skip


def show(work: Rescore, *, as_json: bool) -> None:
    """Print each rollout of a dry run, and the summary."""
    scored, dry, tokens = work.scored, work.dry_run, work.tokens
    failed, found = [one for one in scored if one.error is not None], [*changes(scored)]
    silent = sum(one.error is None and not one.values for one in scored)
    if as_json:
        told: Json = {"asked": len(scored), "failed": len(failed), "without_reward": silent, "tokens": tokens}
        told |= {"scored_before": work.there_before, "rewards": found}
        print_json(told | ({"rollouts": [one._asdict() for one in scored]} if dry else {}))
        return
    for one in scored if dry else ():
        values = ", ".join(f"{name} {_moved(one.before.get(name), value)}" for name, value in one.values.items())
        print(f"{one.rollout_id}: {one.error or values or 'nothing'}")
        for comment in one.comments:
            print(f"  {' / '.join(comment.splitlines())}")
    for change in found:
        moved = _moved(change["mean_before"], change["mean_after"])
        print(f"{change['name']}: {change['rollouts']} rollouts, mean {moved}")
    print(f"{len(scored)} rollouts asked about, {len(failed)} failed, {silent} without a reward, "
          f"{work.there_before} scored by this version before{f'; {tokens:,} tokens were used' if tokens else ''}"
          f"{'; nothing was posted' if dry else ''}")  # fmt: skip
    for one in failed[:SHOWN]:
        typer.echo(f"lightning-proxy: no reward for rollout {one.rollout_id}: {one.error}", err=True)
    if line := not_counted({change["name"] for change in found}, work.config.trainer):
        typer.echo(f"lightning-proxy: {line}", err=True)


def _moved(before: float | None, after: float) -> str:
    return number(after) if before is None else f"{number(before)} -> {number(after)}"


@asynccontextmanager
async def opened(config: Config, which: str) -> AsyncIterator[Rewarder]:
    """Yield a rewarder of the configuration, whose budget counts for this run. Raise ConfigError also if it is away."""
    if which != "function":
        await check(config)
    name, one = named(config, which)
    rewarder = made(name, one, config)
    try:
        await rewarder.check()
        yield rewarder
    except Away as error:
        raise ConfigError(f"{rewarder.label}: {error}") from None
    finally:
        await rewarder.close()


async def read_rollouts(api: ApiClient, rollout_ids: Sequence[str]) -> list[Json]:
    """Return rollouts with full requests, without those that were deleted."""
    found = []
    for rollout_id in rollout_ids:
        try:
            rollout = await api.request("GET", f"/rollouts/{quote(rollout_id, safe='')}?requests=whole")
        except ApiError as error:
            if error.status_code != GONE:
                raise
        else:
            found.append(rollout)
    return found
