"""Asks a rewarder about recorded rollouts, and posts its answers as rewards: `rescore`; what `rewards check` reads."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import compress
from statistics import fmean
from urllib.parse import quote

import typer

from ...commands.api_client import ApiClient, ApiError
from ...commands.formats import number, print_json, progress_bar
from ...commands.show.find import PAGE, find, since_of
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...trainer.waiting import all_of
from .model import Away, Json
from .rewarders import Rewarder
from .scoring import all_rewarders, check, not_counted

POSTED = ("rollout_id", "reward", "call_id", "name", "source", "comment", "final")


@dataclass(slots=True, kw_only=True)
class Rescore:
    """One run of the command, by its options. `ids`: these rollouts alone, as siblings.

    `scored`: what each rollout was given. `there_before`: rollouts that have this version's rewards already.
    """

    config: Config
    ids: Sequence[str]
    task: str | None
    since: str | None
    rewarder: str
    again: bool
    retrain: bool
    dry_run: bool
    scored: list[Json] = field(default_factory=list)
    there_before: int = 0

    async def run(self) -> None:
        """Ask and post. Raise ConfigError if that cannot begin or go on."""
        async with opened(self.config, self.rewarder) as rewarder, ApiClient.of(self.config, patience_s=60) as api:
            groups, slots = await self._groups(api, rewarder), asyncio.Semaphore(rewarder.at_once)
            with progress_bar() as progress:
                bar = progress.add_task("rollouts", total=sum(map(len, groups)))

                async def score(group: list[str]) -> None:
                    async with slots:
                        await self._score(api, rewarder, group)
                    progress.advance(bar, len(group))

                await all_of(map(score, groups))

    async def _groups(self, api: ApiClient, rewarder: Rewarder) -> list[list[str]]:
        """Ids of rollouts with rewards that are posted together: a task's, where they are compared or retrained."""
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
        """Ask about rollouts, without any that has this version's rewards already, and post all of it at once."""
        posts, scored = list[Json](), list[Json]()
        for part in [group] if rewarder.in_groups else [[rollout_id] for rollout_id in group]:
            rollouts, source = await read_rollouts(api, part), await rewarder.source()
            is_new = [
                self.again or self.dry_run or all(one["source"] != source for one in rollout["rewards"])
                for rollout in rollouts
            ]
            self.there_before += is_new.count(False)
            answers = await rewarder.reward(rollouts) if any(is_new) else []
            for rollout, given in compress(zip(rollouts, answers, strict=False), is_new):
                error, rewards = (given, []) if isinstance(given, str) else (None, given)
                values, comments = defaultdict[str, float](float), [one.comment for one in rewards if one.comment]
                for one in rewards:
                    values[one.name] += one.reward
                    posts.append({key: getattr(one, key) for key in POSTED} | {"retrain": self.retrain})
                about = {"rollout_id": rollout["rollout_id"], "values": values, "comments": comments, "error": error}
                scored.append(about)
        if posts and not self.dry_run:
            await api.request("POST", "/reward", posts)
        self.scored += scored


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
    if any(one["error"] is not None for one in work.scored):
        raise typer.Exit(1)


def show(work: Rescore, *, as_json: bool) -> None:
    """Print each rollout of a dry run, the mean of each reward's name, and the counts."""
    scored, failed = work.scored, [one for one in work.scored if one["error"] is not None]
    names = {name for one in scored for name in one["values"]}
    silent = sum(not one["values"] for one in scored) - len(failed)
    means = {name: fmean(one["values"][name] for one in scored if name in one["values"]) for name in sorted(names)}
    if as_json:
        told: Json = {"asked": len(scored), "failed": len(failed), "without_reward": silent, "means": means}
        print_json(told | {"scored_before": work.there_before, "rollouts": scored if work.dry_run else []})
        return
    for one in scored if work.dry_run else ():
        values = ", ".join(f"{name} {number(value)}" for name, value in one["values"].items())
        print(f"{one['rollout_id']}: {one['error'] or values or 'nothing'}")
        for comment in one["comments"]:
            print(f"  {' / '.join(comment.splitlines())}")
    for name, mean in means.items():
        print(f"{name}: mean {number(mean)}")
    posted = "; nothing was posted" if work.dry_run else ""
    print(f"{len(scored)} rollouts asked about, {len(failed)} failed, {silent} without a reward, "
          f"{work.there_before} scored by this version before{posted}")  # fmt: skip
    for one in failed[:5]:
        typer.echo(f"lightning-proxy: no reward for rollout {one['rollout_id']}: {one['error']}", err=True)
    if line := not_counted(names, work.config.trainer):
        typer.echo(f"lightning-proxy: {line}", err=True)


@asynccontextmanager
async def opened(config: Config, which: str) -> AsyncIterator[Rewarder]:
    """Yield the rewarder with this name or kind; its budget counts for this run. Raise ConfigError."""
    if which != "function":
        await check(config)
    every = all_rewarders(config)
    found = [one for one in every if one.name == which] or [one for one in every if one.kind == which]
    if len(found) != 1:
        known = ", ".join(f"{one.kind} ({one.name})" for one in every) or "none"
        raise ConfigError(f"judge.use has {'several' if found else 'no'} {which}; there is {known}")
    try:
        await found[0].check()
        yield found[0]
    except Away as error:
        raise ConfigError(f"{found[0].label}: {error}") from None
    finally:
        await found[0].close()


async def read_rollouts(api: ApiClient, rollout_ids: Sequence[str]) -> list[Json]:
    """Return rollouts with full requests, without the ones that were deleted."""
    found = []
    for rollout_id in rollout_ids:
        try:
            found.append(await api.request("GET", f"/rollouts/{quote(rollout_id, safe='')}?requests=whole"))
        except ApiError as error:
            if error.status_code != 404:
                raise
    return found
