"""Asks a rewarder about recorded rollouts: `rescore` posts its answers, `rewards check` compares them with labels."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, compress
from statistics import fmean
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import typer
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from ...commands.api_client import ApiClient, ApiError
from ...commands.formats import number, print_json, progress_bar
from ...commands.show.find import PAGE, collect, find, since_of
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.statistics import bootstrap_mean
from ...trainer.waiting import all_of
from .model import Away, Json
from .rewarders import Rewarder
from .scoring import all_rewarders, check, not_counted

ENOUGH = 20  # labels, to begin with
FURTHEST = 5
NEWEST = 500  # rollouts that are looked at for labels
TASKS = 5  # from this number on, tasks are drawn for the interval, else rollouts
POSTED = ("rollout_id", "reward", "call_id", "name", "source", "comment", "final")


@dataclass(slots=True, kw_only=True)
class Rescore:
    """A run of `rescore`. `scored`: each rollout's rewards or error. `there_before`: how many were scored before."""

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
        """Ask the rewarder and post its rewards. Raises ConfigError if the rewarder cannot start or continue."""
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
        """Lists of rollouts to post together: the given ones, or those of a task if siblings matter, or single ones."""
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
        """Score the rollouts that still need it, and post their rewards unless this is a dry run."""
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
    """Run the command and print the results. Exits with 1 if the rewarder failed for a rollout."""
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
    """Yield the rewarder with this name or kind. Raises ConfigError unless exactly one matches and can work."""
    if which != "function":
        await check(config)
    every = all_rewarders(config)
    found = [one for one in every if one.name == which] or [one for one in every if one.kind == which]
    if len(found) != 1:
        known = ", ".join(f"{one.kind} ({one.name})" for one in every) or "none"
        raise ConfigError(f"{'several rewarders match' if found else 'no rewarder matches'} {which}; known: {known}")
    try:
        await found[0].check()
        yield found[0]
    except Away as error:
        raise ConfigError(f"{found[0].label}: {error}") from None
    finally:
        await found[0].close()


async def read_rollouts(api: ApiClient, rollout_ids: Sequence[str]) -> list[Json]:
    """Return rollouts with full requests, skipping deleted ones."""
    found = []
    for rollout_id in rollout_ids:
        try:
            found.append(await api.request("GET", f"/rollouts/{quote(rollout_id, safe='')}?requests=whole"))
        except ApiError as error:
            if error.status_code != 404:
                raise
    return found


class Labelled(NamedTuple):
    rollout_id: str
    task_id: str | None
    label: float
    score: float


class Agreement(NamedTuple):
    """`alike`: the share of `pairs` that labels and scores order alike, with its 95 % interval (`low` to `high`)."""

    labels: int
    pairs: int
    alike: float
    low: float
    high: float
    furthest: list[Labelled]

    @property
    def verdict(self) -> str:
        if self.low <= 0.5:
            return "do not train on this rewarder: its order may be chance"
        if self.labels < ENOUGH:
            return (
                f"this rewarder agrees more than chance would, but {self.labels} labels are few: use {ENOUGH} or more"
            )
        return "this rewarder agrees more than chance would"


def agreement(found: Sequence[Labelled], *, within_tasks: bool) -> Agreement | None:
    """Return how scores agree with labels; None without pairs. Pairs are of one task if required or possible."""
    labels, scores = (np.array([one[i] for one in found], dtype=float) for i in (2, 3))
    tasks = np.array([one.task_id or one.rollout_id for one in found])
    siblings, pairs = tasks[:, None] == tasks, np.triu(labels[:, None] != labels)
    if within_tasks := within_tasks or bool((pairs & siblings).any()):
        pairs &= siblings
    first, second = np.nonzero(pairs)
    if not len(first):
        return None
    by_label, by_score = (np.sign(values[first] - values[second]) for values in (labels, scores))
    alike = np.where(by_score == 0, 0.5, by_score == by_label)
    units, shares = tasks[first], alike
    if not within_tasks or len({*units}) < TASKS:
        units, shares = np.concatenate((first, second)), np.tile(alike, 2)
    drawn = [shares[units == unit] for unit in np.unique(units)]
    interval = bootstrap_mean([float(one.mean()) for one in drawn], seed=0, weights=[*map(len, drawn)])
    ranks = [(values[:, None] > values).sum(1) + (values[:, None] == values).sum(1) / 2 for values in (labels, scores)]
    furthest = np.argsort(-np.abs(ranks[0] - ranks[1]), kind="stable")[:FURTHEST]
    numbers = float(alike.mean()), interval.low, interval.high
    return Agreement(len(found), len(first), *numbers, [found[i] for i in furthest])


def check_rewarder(config: Config, which: str, label: str, *, as_json: bool) -> None:
    source, found, silent = run_until_signal(_checked(config, which, label))
    if as_json:
        more = {"verdict": found.verdict, "without_score": len(silent)}
        furthest = [one._asdict() for one in found.furthest]
        print_json({"source": source, **found._asdict(), **more, "furthest": furthest})
        return
    print(f"{source}: {found.labels} labels named {label}")
    if silent:
        print(f"{len(silent)} more labelled rollouts have no score; first reason: {silent[0]}")
    print(f"pairs ordered alike: {found.alike:.2f} ({found.low:.2f} to {found.high:.2f}) of {found.pairs}")
    print("scores furthest from their labels:")
    for one in found.furthest:
        address = f"{ApiClient.of(config).url}/#/rollouts/{one.rollout_id}"
        print(f"  {address}  label {number(one.label)}, score {number(one.score)}")
    print(found.verdict)


async def _checked(config: Config, which: str, label: str) -> tuple[str, Agreement, list[str]]:
    """The rewarder's source, its agreement with the labels, and the reasons why some rollouts have no score."""
    async with opened(config, which) as rewarder, ApiClient.of(config) as api:
        source, is_rank = await rewarder.source(), rewarder.in_groups
        groups = await _labelled(api, label, source)
        if is_rank:
            groups = [group for group in groups if len({value for _, value in group}) > 1]
        if len({value for group in groups for _, value in group}) < 2:
            of = " of one task" if is_rank else ""
            raise ConfigError(f"no two rollouts{of} have different rewards named {label}: label some first, as in "
                              f"`lightning-proxy reward ID 1 --name {label}`")  # fmt: skip
        scores = await all_of(_scores(rewarder, source, [rollout for rollout, _ in group]) for group in groups)
    scored, silent = [], []
    for (rollout, value), score in zip(chain(*groups), chain(*scores), strict=True):
        if isinstance(score, str):
            silent.append(score)
        else:
            scored.append(Labelled(rollout["rollout_id"], rollout["task_id"], value, score))
    found = agreement(scored, within_tasks=is_rank) if scored else None
    if found is None:
        raise ConfigError(f"{source}: {len(silent)} of {len(silent) + len(scored)} labelled rollouts have no score, "
                          f"so too few can be compared; first reason: {next(iter(silent), '')}")  # fmt: skip
    return source, found, silent


async def _labelled(api: ApiClient, label: str, source: str) -> list[list[tuple[Json, float]]]:
    """The labelled rollouts among the newest completed ones, each with its label, in a list per task."""
    own, groups = source.partition("@")[0], defaultdict[str, list[tuple[Json, float]]](list)
    listed = (await collect(api, {"status": "completed"}, NEWEST))[0]
    for rollout in await read_rollouts(api, [one["rollout_id"] for one in listed]):
        newest = {
            (one["source"], one["call_id"]): one["reward"]
            for one in rollout["rewards"]
            if one["name"] == label and (one["source"] or "").partition("@")[0] != own
        }
        if newest:
            of_rollout = [value for (_, call_id), value in newest.items() if call_id is None]
            value = fmean(of_rollout) if of_rollout else sum(newest.values())
            groups[rollout["task_id"] or rollout["rollout_id"]].append((rollout, value))
    return [*groups.values()]


@retry(retry=retry_if_exception_type(Away), stop=stop_after_attempt(4), wait=wait_exponential(2), reraise=True)
async def _scores(rewarder: Rewarder, source: str, rollouts: Sequence[Json]) -> list[float | str]:
    """Each rollout's score, or why it has none. Recorded scores are used if all of the rollouts have them."""
    recorded = [
        {(one["name"], one["call_id"]): one["reward"] for one in rollout["rewards"] if one["source"] == source}
        for rollout in rollouts
    ]
    if all(recorded):
        return [float(sum(rewards.values())) for rewards in recorded]
    given = await rewarder.reward(rollouts)
    return [
        one if isinstance(one, str) else sum(r.reward for r in one) if one else "no reward was given" for one in given
    ]
