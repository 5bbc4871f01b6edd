"""Weighs the rollouts of a test: groups of siblings become pairs, pairs evidence, and evidence a decision. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ...core.statistics import Evidence, interval
from .metrics import GuardedMetric
from .sides import LONE, group_of
from .tests import Observed, Outcome, Promotion

Key = tuple[str, str | None, int]  # who opened it, a task, and the number of a group


@dataclass(frozen=True, slots=True)
class GateRules:
    """The rules of a test. `group_size`: siblings of a group; `group_timeout_s`: after which no more are waited for.

    `max_rollouts`, `reward_timeout_s`, `level`: as in the section `promotion`.
    """

    metrics: Sequence[GuardedMetric]
    level: float
    max_rollouts: int
    reward_timeout_s: float
    group_size: int
    group_timeout_s: float


class SiblingGroup(NamedTuple):
    """Siblings that are complete, or waited for no more."""

    candidate: list[Observed]
    live: list[Observed]


class Weighed(NamedTuple):
    """The numbers of a test, as they are kept, and what follows from them; `outcome` None: the test continues."""

    evidence: dict[str, Any]
    outcome: Outcome | None
    reason: str


def weigh(test: Promotion, rollouts: Sequence[Observed], rules: GateRules, now: float) -> Weighed:
    """Return the evidence of a test's compared rollouts at this time."""
    is_full = len(rollouts) >= rules.max_rollouts
    groups, open_groups = _groups(test, rollouts, rules, now, is_full)
    found = {metric.name: _compared(metric, groups, rules) for metric in rules.metrics}
    sides = {"candidate": [r for r in rollouts if r.version == test.version]}
    sides["live"] = [r for r in rollouts if r.version != test.version]
    evidence = {
        "rollouts": len(rollouts),
        "max_rollouts": rules.max_rollouts,
        "level": rules.level,
        "groups": len(groups),
        **{side: _counts(members, groups, rules) for side, members in sides.items()},
        "metrics": {name: numbers for name, (numbers, _) in found.items()},
    }
    outcome, reason = _decision({name: judged for name, (_, judged) in found.items()}, is_full and not open_groups)
    return Weighed(evidence, outcome, reason)


def _groups(
    test: Promotion, rollouts: Sequence[Observed], rules: GateRules, now: float, is_full: bool
) -> tuple[list[SiblingGroup], int]:
    """Groups that are complete or waited for no more, and how many others there are.

    They count in the order in which they began, each after those before it: else a version whose failures take longer
    would look better than it is (docs/promotion.md).
    """
    members: Mapping[Key, list[Observed]] = defaultdict(list)
    for rollout in rollouts:
        number = group_of(rollout.place, rollout.task_id, rules.group_size)
        members[rollout.opened_by, rollout.task_id, number].append(rollout)
    groups = list[SiblingGroup]()
    for (_, task_id, _), found in members.items():
        siblings = _in_time(found, rules.group_timeout_s)
        at = max(_settled_at(rollout, rules) for rollout in siblings)
        is_complete = len(found) >= (LONE if task_id is None else rules.group_size) or len(siblings) < len(found)
        if not is_complete and not is_full:
            at = max(at, siblings[-1].created_at + rules.group_timeout_s)
        if at > now:
            break
        counted = [rollout for rollout in siblings if _counts_at_all(rollout)]
        candidate = [rollout for rollout in counted if rollout.version == test.version]
        groups.append(SiblingGroup(candidate, [rollout for rollout in counted if rollout.version != test.version]))
    return groups, len(members) - len(groups)


def _in_time(siblings: Sequence[Observed], timeout_s: float) -> Sequence[Observed]:
    """The siblings that began before the group was waited for no more: a pair that has counted does not change."""
    pairs = enumerate(pairwise(siblings), 1)
    end = next((n for n, (one, other) in pairs if other.created_at > one.created_at + timeout_s), len(siblings))
    return siblings[:end]


def _settled_at(rollout: Observed, rules: GateRules) -> float:
    """The time from which on a rollout's values count: it has ended and has its rewards, or is waited for no more."""
    if rollout.ended_at is None:
        return rollout.created_at + rules.reward_timeout_s
    rewarded = all(metric.of(rollout) is not None for metric in rules.metrics if metric.is_reward)
    if rewarded or rollout.status != "completed":
        return max([rollout.ended_at, *(reward.created_at or 0.0 for reward in rollout.rewards)])
    return rollout.ended_at + rules.reward_timeout_s


def _counts_at_all(rollout: Observed) -> bool:
    """Whether its version alone answered a rollout that nobody discarded."""
    return rollout.status != "discarded" and rollout.shown > 0 and not rollout.foreign_calls and not rollout.mixed


def _compared(
    metric: GuardedMetric, groups: Sequence[SiblingGroup], rules: GateRules
) -> tuple[dict[str, Any], Evidence]:
    """One metric's numbers, as they are kept, and its evidence."""
    pairs, sums, clipped = list[float](), {"candidate": list[float](), "live": list[float]()}, 0
    for group in groups:
        candidate, live = (
            [value for rollout in side if (value := metric.of(rollout)) is not None]
            for side in (group.candidate, group.live)
        )
        clipped += sum(metric.is_clipped(value) for value in (*candidate, *live))
        sums["candidate"] += candidate
        sums["live"] += live
        if candidate and live:
            pairs.append(metric.difference(candidate, live))
    evidence = Evidence(metric.margin, rules.level, len(rules.metrics))
    evidence.extend(pairs)
    between = interval(pairs, rules.level, len(rules.metrics))
    return {
        "margin": metric.margin,
        "pairs": evidence.pairs,
        "difference": evidence.mean,
        "interval": None if between is None else [between.low, between.high],
        "e_drop": evidence.e_drop,
        "e_safe": evidence.e_safe,
        "verdict": evidence.verdict,
        "clipped": clipped,
        **{side: sum(values) / len(values) if values else None for side, values in sums.items()},
    }, evidence


def _counts(members: Sequence[Observed], groups: Sequence[SiblingGroup], rules: GateRules) -> dict[str, int]:
    """How many rollouts one version has: in all, counted so far, failed, and left out for want of a reward."""
    ids = {rollout.rollout_id for group in groups for rollout in (*group.candidate, *group.live)}
    counted = [rollout for rollout in members if rollout.rollout_id in ids]
    rewards = [metric for metric in rules.metrics if metric.is_reward]
    return {
        "rollouts": len(members),
        "counted": len(counted),
        "failed": sum(rollout.status == "failed" for rollout in members),
        "unrewarded": sum(any(metric.of(rollout) is None for metric in rewards) for rollout in counted),
    }


def _decision(judged: Mapping[str, Evidence], is_over: bool) -> tuple[Outcome | None, str]:
    """The outcome of each metric's evidence; `is_over`: no more rollouts will come."""
    worse = [name for name, evidence in judged.items() if evidence.verdict == "worse"]
    if worse:
        return "rejected", "; ".join(f"{name} is worse: {_evidence_line(judged[name])}" for name in worse)
    if all(evidence.verdict == "safe" for evidence in judged.values()):
        judgements = (
            f"{name}: {_evidence_line(one)}, a drop of {one.margin:g} is excluded" for name, one in judged.items()
        )
        return "promoted", "; ".join(judgements)
    if not is_over:
        return None, ""
    if without := [name for name, one in judged.items() if one.mean is None]:
        why = "no task had rollouts of both versions with a value of it"
        return "rejected", f"undecided at max_rollouts: {'; '.join(f'{name}: {why}' for name in without)}"
    low = [name for name, one in judged.items() if one.mean is not None and one.mean < -one.margin / 2]
    judgements = (f"{name}: {_evidence_line(judged[name])}" for name in low or judged)
    bound = "at most half a drop" if not low else "more than half a drop"
    return ("rejected" if low else "promoted"), f"undecided at max_rollouts, {bound}: {'; '.join(judgements)}"


def _evidence_line(evidence: Evidence) -> str:
    return f"{evidence.mean:+.3f} on average of {evidence.pairs} pairs"
