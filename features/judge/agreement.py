"""`rewards check`: whether a rewarder can be believed, by people's labels."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from ...commands.api_client import ApiClient
from ...commands.formats import number, print_json
from ...commands.show.find import collect
from ...commands.signals import run_until_signal
from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.statistics import bootstrap_mean
from ...proxy.dialects.transcript import body, chat_turns
from ...store.opening import opened as opened_store
from ...trainer.waiting import all_of
from .rescore import opened, read_rollouts
from .rewarder import Away, Json, Rewarder, decisions

ENOUGH = 20  # labels, to begin with
CHECK_KEEP = """
INSERT INTO rewarder_checks (source, at, labels, alike, low, high) VALUES (:source, :at, :labels, :alike, :low, :high)
ON CONFLICT (source) DO UPDATE
SET at = excluded.at, labels = excluded.labels, alike = excluded.alike, low = excluded.low, high = excluded.high
"""
FURTHEST = 5
NEWEST = 500  # rollouts that are looked at for labels
TASKS = 5  # so many are what is drawn for the interval; of fewer, rollouts are
Numbers = NDArray[Any]


class Labelled(NamedTuple):
    """A rollout with somebody's label, a rewarder's score, and the length of its last answer in characters."""

    rollout_id: str
    task_id: str | None
    label: float
    score: float
    length: int


class Agreement(NamedTuple):
    """How a rewarder agrees with `labels` labels.

    `alike`: the share of `pairs` that both order alike, with its 95 % interval; a tie of the score counts a half.
    `length_of_scores`, `length_of_labels`: how they go with the length of the answer (rank correlation).
    """

    labels: int
    pairs: int
    alike: float
    low: float
    high: float
    length_of_scores: float | None
    length_of_labels: float | None
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
    labels, scores, lengths = (np.array([one[i] for one in found], dtype=float) for i in (2, 3, 4))
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
    apart = np.abs(_ranks(scores) - _ranks(labels))
    return Agreement(
        len(found), len(first), float(alike.mean()), interval.low, interval.high,
        spearman(scores, lengths), spearman(labels, lengths),
        [found[i] for i in np.argsort(-apart, kind="stable")[:FURTHEST]],
    )  # fmt: skip


def spearman(one: Numbers, other: Numbers) -> float | None:
    """Return the rank correlation; None where one side does not vary."""
    ranks = _ranks(one), _ranks(other)
    return float(np.corrcoef(*ranks)[0, 1]) if all(map(np.ptp, ranks)) else None


def _ranks(values: Numbers) -> Numbers:
    """The share of all values that are below each, and half of those that are equal."""
    ordered = np.sort(values)
    both = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return np.asarray(both / 2 / len(values))


def check_rewarder(config: Config, which: str, label: str, *, as_json: bool) -> None:
    """Print how a rewarder agrees with people's labels, and keep that it was checked."""
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
    print(f"rank correlation with the length of the answer: {number(found.length_of_scores)} of scores, "
          f"{number(found.length_of_labels)} of labels")  # fmt: skip
    print("it is furthest from the label for")
    for one in found.furthest:
        address = f"{ApiClient.of(config).url}/#/rollouts/{one.rollout_id}"
        print(f"  {address}  label {number(one.label)}, score {number(one.score)}")
    print(found.verdict)


async def _checked(config: Config, which: str, label: str) -> tuple[str, Agreement, list[str]]:
    """The rewarder's source, its agreement, and why rollouts have no score."""
    async with opened(config, which) as rewarder, ApiClient.of(config) as api:
        source = await rewarder.source()
        groups = await _labelled(api, label, source)
        if rewarder.in_groups:
            groups = [group for group in groups if len({value for _, value in group}) > 1]
        if len({value for group in groups for _, value in group}) < 2:
            of = " of one task" if rewarder.in_groups else ""
            raise ConfigError(f"no two rollouts{of} have different rewards named {label}: label some first, as in "
                              f"`lightning-proxy reward ID 1 --name {label}`")  # fmt: skip
        scores = await all_of(_scores(rewarder, source, [rollout for rollout, _ in group]) for group in groups)
    scored, silent = [], []
    for group, of_group in zip(groups, scores, strict=True):
        for (rollout, value), score in zip(group, of_group, strict=True):
            if isinstance(score, str):
                silent.append(score)
                continue
            (last,) = chat_turns(decisions(rollout)[-1:]) or (None,)
            length = sum(len(body(message)) for message in last.answer) if last else 0
            scored.append(Labelled(rollout["rollout_id"], rollout["task_id"], value, score, length))
    found = agreement(scored, within_tasks=rewarder.in_groups) if scored else None
    if found is None:
        raise ConfigError(f"{source}: too few labelled rollouts have a score: {len(silent)} of "
                          f"{len(silent) + len(scored)} have none: {next(iter(silent), '')}")  # fmt: skip
    if label == "human":
        await _keep(config, source, found)
    return source, found, silent


async def _keep(config: Config, source: str, found: Agreement) -> None:
    if not config.store.may_be_there:
        typer.echo("lightning-proxy: the store is not here, so `status` will not know of this check", err=True)
        return
    async with opened_store(config.store) as database:
        numbers = {"labels": found.labels, "alike": found.alike, "low": found.low, "high": found.high}
        await database.execute(CHECK_KEEP, source=source, at=time.time(), **numbers)


async def _labelled(api: ApiClient, label: str, source: str) -> list[list[tuple[Json, float]]]:
    """The newest completed rollouts with a label, by task; those without a task are alone.

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
    return [
        sum(reward.reward for reward in one.rewards) if one.rewards else one.error or "it gives them nothing"
        for one in await rewarder.reward(rollouts)
    ]
