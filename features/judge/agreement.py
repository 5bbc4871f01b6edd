"""`rewards check`: whether a rewarder can be believed, by people's labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import numpy as np
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from ...commands.api_client import ApiClient
from ...commands.formats import number, print_json
from ...commands.show.find import collect
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.statistics import bootstrap_mean
from ...trainer.waiting import all_of
from .model import Away, Json
from .rescore import opened, read_rollouts
from .rewarders import Rewarder

ENOUGH = 20  # labels, to begin with
FURTHEST = 5
NEWEST = 500  # rollouts that are looked at for labels
TASKS = 5  # from this number on, tasks are drawn for the interval, else rollouts


class Labelled(NamedTuple):
    """A rollout with somebody's label and a rewarder's score."""

    rollout_id: str
    task_id: str | None
    label: float
    score: float


class Agreement(NamedTuple):
    """How a rewarder agrees with `labels` labels.

    `alike`: the share of `pairs` that both order alike, with its 95 % interval; a tie of the score counts a half.
    `furthest`: where the places by label and by score are furthest apart.
    """

    labels: int
    pairs: int
    alike: float
    low: float
    high: float
    furthest: list[Labelled]

    @property
    def verdict(self) -> str:
        if self.low <= 0.5:
            return "it should not be trained on: its order may be chance"
        if self.labels < ENOUGH:
            return f"it agrees more than chance does, by {self.labels} labels; {ENOUGH} are enough to begin"
        return "it agrees more than chance does"


def agreement(found: Sequence[Labelled], *, within_tasks: bool) -> Agreement | None:
    """Return how scores agree with labels; None if no two labels differ.

    `within_tasks`: only rollouts of one task are compared. Otherwise that is so where there are such pairs.
    """
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
    """Print how a rewarder agrees with people's labels."""
    source, found, silent = run_until_signal(_checked(config, which, label))
    if as_json:
        more = {"verdict": found.verdict, "without_score": len(silent)}
        furthest = [one._asdict() for one in found.furthest]
        print_json({"source": source, **found._asdict(), **more, "furthest": furthest})
        return
    print(f"{source}: {found.labels} labels named {label}")
    if silent:
        print(f"{len(silent)} more have no score: {silent[0]}")
    print(f"pairs ordered alike: {found.alike:.2f} ({found.low:.2f} to {found.high:.2f}) of {found.pairs}")
    print("it is furthest from the label for")
    for one in found.furthest:
        address = f"{ApiClient.of(config).url}/#/rollouts/{one.rollout_id}"
        print(f"  {address}  label {number(one.label)}, score {number(one.score)}")
    print(found.verdict)


async def _checked(config: Config, which: str, label: str) -> tuple[str, Agreement, list[str]]:
    """The rewarder's source, its agreement, and why rollouts have no score."""
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
        raise ConfigError(f"{source}: too few labelled rollouts have a score: {len(silent)} of "
                          f"{len(silent) + len(scored)} have none: {next(iter(silent), '')}")  # fmt: skip
    return source, found, silent


async def _labelled(api: ApiClient, label: str, source: str) -> list[list[tuple[Json, float]]]:
    """The newest completed rollouts with a label, by task; each without a task is alone.

    The label is the mean over sources of the newest reward of the rollout, or else the sum of its calls'. What the
    rewarder of this source gave, or an earlier version of it, is no label.
    """
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
    """The scores of a group, recorded ones if all of it has them, or else the rewarder's answers; or why it has none.

    A rewarder that is away for seconds is asked again; what it answered is not paid for again.
    """
    recorded = [
        {(one["name"], one["call_id"]): one["reward"] for one in rollout["rewards"] if one["source"] == source}
        for rollout in rollouts
    ]
    if all(recorded):
        return [float(sum(rewards.values())) for rewards in recorded]
    given = await rewarder.reward(rollouts)
    return [
        one if isinstance(one, str) else sum(r.reward for r in one) if one else "it gives them nothing" for one in given
    ]
