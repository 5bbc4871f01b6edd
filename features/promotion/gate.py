"""The gate before new versions of the policy: weighs the rollouts of a test, and decides.

Groups of siblings become pairs, pairs evidence by each guarded metric, and evidence a decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from ...core.config.root import Config
from ...core.errors import LightningError
from ...core.http import in_thread_if_large
from ...core.returns import LARGEST, Rules, earned
from ...core.statistics import Evidence, difference, evidence_of, interval, sign_difference
from ...store.store import Store
from .config import NO_REWARDS, PromotionConfig
from .promotions import LONE, Observed, Outcome, Promotion, Promotions

log = logging.getLogger(__name__)
LOOK_S = 1.0
PACE = 1_000  # rollouts that are read a second, at most: time that others take from a look must not put off the next
LOOK_ANYWAY_S = 10.0  # time alone settles rollouts without a reward
LARGE = 1_000  # bytes; a rollout is weighed like so many of JSON
NO_EVIDENCE = (
    "no rollout of its test is evidence: none was opened or rewarded with an admin's key, or one of "
    "`keys create NAME --evaluator` (docs/training.md)"
)
TRAINED = "reward"  # what the trainer counts: named rewards, times their weights
SIDES = ("candidate", "live")
# Siblings that are complete, or waited for no more: the values of each by metric, by side.
SiblingGroup = dict[str, list[dict[str, float | None]]]


class Gate:
    """Decides about candidates by the rewards in the store. All its state is there: a restart changes nothing."""

    def __init__(self, config: Config, store: Store, tests: Promotions) -> None:
        self._config, self._store, self._tests = config, store, tests
        self._without_evidence: set[int] = set()  # tests without evidence, each logged once
        self._seen: tuple[int, tuple[Any, ...], float] = (0, (), 0.0)  # a test, its stamp, and until when it holds

    async def run(self) -> None:
        """Weigh new rollouts and decide until cancelled. One process of several does it."""
        while True:
            read = 0
            try:
                if await self._tests.under_way():
                    async with self._store.database.lock("gate") as ours:
                        if ours:
                            read = await self.look()
            except (LightningError, OSError) as error:  # the next look may succeed
                log.warning("candidates cannot be weighed now: %s", error)
            except Exception:  # without a gate the trainer would wait for ever
                log.exception("candidates cannot be weighed")
            await asyncio.sleep(max(LOOK_S, read / PACE))

    async def look(self) -> int:
        """Weigh the rollouts so far, and decide if they are enough; return how many were read."""
        test = await self._tests.under_way()
        if test is None:
            return 0
        now, stamp = time.time(), await self._tests.stamp(test)
        if self._seen[:2] == (test.n, stamp) and now < self._seen[2]:
            return 0
        rollouts = await self._tests.observed(test)
        if not rollouts and test.n not in self._without_evidence and await self._tests.has_others(test):
            self._without_evidence.add(test.n)
            log.warning("policy version %d: %s", test.version, NO_EVIDENCE)
        weighed = await in_thread_if_large(LARGE * len(rollouts), partial(weigh, test, rollouts, self._config, now))
        if weighed.outcome == "promoted" and await self._store.steps.collapse() is not None:
            # A new live version would lift the stop, which only a person may.
            weighed = Weighed(weighed.evidence | {"waits": "publication is stopped for a collapse"}, None, "")
        if weighed.outcome is None:
            await self._tests.found(test, weighed.evidence)
        elif await self._tests.decide(test, weighed.outcome, weighed.reason, weighed.evidence):
            what = "is live" if weighed.outcome == "promoted" else "is taken back"
            log.warning("policy version %d %s after its test: %s", test.version, what, weighed.reason)
        self._seen = test.n, stamp, now + LOOK_ANYWAY_S
        return len(rollouts)


class GuardedMetric(NamedTuple):
    """A metric that must not become worse. `range`: None where only the order of two values counts.

    `rewards`: how rewards are counted; higher is better, and a failed rollout has the lowest value. Of metrics without
    it lower is better.
    """

    name: str
    margin: float
    range: tuple[float, float] | None
    rewards: Rules | None

    def of(self, rollout: Observed) -> float | None:
        """Return the rollout's value; None if it has none, or none yet."""
        if self.rewards is None:
            value = getattr(rollout, self.name)
            return None if value is None else float(value)
        if self.range is not None and rollout.status == "failed":
            return self.range[0]
        return earned(rollout.rewards, self.rewards).returned

    def difference(self, values: Mapping[str, Sequence[float]]) -> float:
        """Return how far the candidate's siblings are better than those of the live version: one pair, in [-1, 1]."""
        better, other = (values[side] for side in (SIDES if self.rewards else reversed(SIDES)))
        return sign_difference(better, other) if self.range is None else difference(better, other, *self.range)


def metrics_of(config: Config) -> list[GuardedMetric]:
    """Return the metrics of the gate; `reward` counts as the trainer has it."""
    gate, found = config.section(PromotionConfig), list[GuardedMetric]()
    for name, margin in gate.metrics.items():
        if name in NO_REWARDS:
            found.append(GuardedMetric(name, margin, NO_REWARDS[name], None))
        else:
            weights = dict(config.trainer.reward_weights) if name == TRAINED else {name: 1.0}
            rules = Rules(weights, within=(-LARGEST, LARGEST))  # a gate has a range of its own
            found.append(GuardedMetric(name, margin, gate.reward_ranges.get(name, gate.reward_range), rules))
    return found


class Weighed(NamedTuple):
    """The numbers of a test, as they are kept, and what follows from them; `outcome` None: the test continues."""

    evidence: dict[str, Any]
    outcome: Outcome | None
    reason: str


def weigh(test: Promotion, rollouts: Sequence[Observed], config: Config, now: float) -> Weighed:
    """Return the evidence of a test's compared rollouts at this time, and the decision if it is enough."""
    gate, metrics = config.section(PromotionConfig), metrics_of(config)
    is_full = len(rollouts) >= gate.max_rollouts
    groups, are_all = _groups(test, rollouts, config, now, is_full)
    compared = {metric.name: _compared(metric, groups, gate.level, len(metrics)) for metric in metrics}
    rewards = [metric.name for metric in metrics if metric.rewards is not None]
    evidence: dict[str, Any] = {
        "rollouts": len(rollouts),
        "max_rollouts": gate.max_rollouts,
        "level": gate.level,
        "groups": len(groups),
        "metrics": {name: numbers for name, (numbers, _) in compared.items()},
    }
    for side, version in zip(SIDES, (test.version, test.against), strict=True):
        own, counted = [one for one in rollouts if one.version == version], [v for group in groups for v in group[side]]
        evidence[side] = {
            "rollouts": len(own),
            "failed": sum(one.status == "failed" for one in own),
            "unrewarded": sum(any(values[name] is None for name in rewards) for values in counted),
        }
    outcome, reason = _decision({name: one for name, (_, one) in compared.items()}, is_full and are_all)
    return Weighed(evidence, outcome, reason)


def _groups(
    test: Promotion, rollouts: Sequence[Observed], config: Config, now: float, is_full: bool
) -> tuple[list[SiblingGroup], bool]:
    """Groups that are complete or waited for no more, and whether these are all.

    They count in the order in which they began, each after those before it: else a version whose failures take longer
    would look better than it is (docs/training.md).
    """
    size, timeout_s = config.trainer.group_size, config.trainer.group_timeout_s
    members: dict[tuple[Any, ...], list[Observed]] = defaultdict(list)
    for one in rollouts:
        number = one.place // (LONE if one.task_id is None else size)
        members[one.opened_by, one.task_id, number].append(one)
    metrics, wait_s = metrics_of(config), config.section(PromotionConfig).reward_timeout_s
    groups = list[SiblingGroup]()
    for (_, task_id, _), siblings in members.items():
        # One that began when its group was waited for no more is left out: a pair that has counted does not change.
        pairs = enumerate(pairwise(siblings), 1)
        end = next((n for n, (one, other) in pairs if other.created_at > one.created_at + timeout_s), None)
        at, group = 0.0, SiblingGroup(candidate=[], live=[])
        for one in siblings[:end]:
            values = {metric.name: metric.of(one) for metric in metrics}
            missing = any(values[metric.name] is None for metric in metrics if metric.rewards is not None)
            at = max(at, _settled_at(one, missing, wait_s))
            if one.alone and one.status != "discarded":
                group["candidate" if one.version == test.version else "live"].append(values)
        if end is None and len(siblings) < (LONE if task_id is None else size) and not is_full:
            at = max(at, siblings[-1].created_at + timeout_s)
        if at > now:
            break
        groups.append(group)
    return groups, len(groups) == len(members)


def _settled_at(rollout: Observed, missing: bool, wait_s: float) -> float:
    """The time from which on a rollout's values count: it has ended and has its rewards, or is waited for no more."""
    if rollout.ended_at is None:
        return rollout.created_at + wait_s
    if missing and rollout.status == "completed":
        return rollout.ended_at + wait_s
    return max([rollout.ended_at, *(reward.created_at or 0.0 for reward in rollout.rewards)])


def _compared(
    metric: GuardedMetric, groups: Sequence[SiblingGroup], level: float, metrics: int
) -> tuple[dict[str, Any], Evidence]:
    """One metric's numbers, as they are kept, and its evidence."""
    pairs, seen = list[float](), {side: list[float]() for side in SIDES}
    for group in groups:
        values = {side: [v for one in group[side] if (v := one[metric.name]) is not None] for side in SIDES}
        for side in SIDES:
            seen[side] += values[side]
        if all(values.values()):
            pairs.append(metric.difference(values))
    evidence, between = evidence_of(pairs, metric.margin, level, metrics), interval(pairs, level, metrics)
    return {
        "margin": metric.margin,
        "pairs": evidence.pairs,
        "difference": evidence.mean,
        "interval": None if between is None else [between.low, between.high],
        "e_drop": evidence.e_drop,
        "e_safe": evidence.e_safe,
        "verdict": evidence.verdict,
        **{side: fmean(values) if values else None for side, values in seen.items()},
    }, evidence


def _decision(judged: Mapping[str, Evidence], is_over: bool) -> tuple[Outcome | None, str]:
    """The outcome of each metric's evidence; `is_over`: no more rollouts will come."""
    lines = {name: f"{one.mean or 0.0:+.3f} on average of {one.pairs} pairs" for name, one in judged.items()}
    if worse := [name for name, one in judged.items() if one.verdict == "worse"]:
        return "rejected", "; ".join(f"{name} is worse: {lines[name]}" for name in worse)
    if all(one.verdict == "safe" for one in judged.values()):
        excluded = (f"{name}: {lines[name]}, a drop of {one.margin:g} is excluded" for name, one in judged.items())
        return "promoted", "; ".join(excluded)
    if not is_over:
        return None, ""
    if without := [name for name, one in judged.items() if one.mean is None]:
        why = "no task had rollouts of both versions with a value of it"
        return "rejected", f"undecided at max_rollouts: {'; '.join(f'{name}: {why}' for name in without)}"
    low = [name for name, one in judged.items() if one.mean is not None and one.mean < -one.margin / 2]
    bound = "more than half a drop" if low else "at most half a drop"
    told = "; ".join(f"{name}: {lines[name]}" for name in low or judged)
    return ("rejected" if low else "promoted"), f"undecided at max_rollouts, {bound}: {told}"
