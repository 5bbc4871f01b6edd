"""The gate before new versions of the policy: weighs the rollouts of a test, and decides.

Groups of siblings become pairs, pairs evidence by each guarded metric, and evidence a decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from ...core.config.root import Config
from ...core.errors import LightningError
from ...core.http import in_thread_if_large
from ...core.returns import LARGEST, Rules, earned
from ...core.statistics import Evidence, difference, evidence_of, interval, sign_difference
from ...store.store import Store
from .config import PromotionConfig
from .promotions import Observed, Outcome, Promotion, Promotions
from .splitting import LONE, group_of

log = logging.getLogger(__name__)
LOOK_S = 1.0
PACE = 1_000  # rollouts that are read a second, at most: time that others take from a look must not put off the next
LOOK_ANYWAY_S = 10.0  # time alone settles rollouts without a reward
LARGE = 1_000  # bytes; a rollout is weighed like so many of JSON
NO_EVIDENCE = (
    "no rollout of its test is evidence: none was opened or rewarded with an admin's key, or one of "
    "`keys create NAME --evaluator` (docs/training.md)"
)
Key = tuple[str, str | None, int]  # who opened it, a task, and the number of a group
UNCUT = (-LARGEST, LARGEST)  # a gate has a range of its own
TRAINED = "reward"  # what the trainer counts: named rewards, times their weights
Value = Callable[[Observed], float | None]


def _answer_tokens(rollout: Observed) -> float | None:
    return rollout.tokens / rollout.calls if rollout.calls else None


# Metrics that need no reward: the share of failed tool calls, of answers that were cut off, and of rollouts without a
# reward; tokens of an answer, and milliseconds until it was complete, on average over the rollout's calls.
OWN: Mapping[str, tuple[Value, tuple[float, float] | None]] = {
    "tool_errors": (lambda rollout: rollout.tool_errors or 0.0, (0.0, 1.0)),
    "truncated": (lambda rollout: rollout.truncated, (0.0, 1.0)),
    "unrewarded": (lambda rollout: float(rollout.status == "completed" and not rollout.rewards), (0.0, 1.0)),
    "answer_tokens": (_answer_tokens, None),
    "latency": (lambda rollout: rollout.latency_ms, None),
}


class Gate:
    """Decides about candidates by the rewards in the store. All its state is there: a restart changes nothing."""

    def __init__(self, config: Config, store: Store, tests: Promotions) -> None:
        self._store = store
        self._tests = tests
        self._rules = rules(config)
        self._read = 0  # rollouts of the newest look
        self._without_evidence: set[int] = set()  # tests without evidence, each logged once
        self._seen: tuple[int, tuple[Any, ...], float] = (0, (), 0.0)  # a test, its stamp, and until when it holds

    async def run(self) -> None:
        """Weigh new rollouts and decide until cancelled. One process of several does it."""
        while True:
            self._read = 0
            try:
                if await self._tests.under_way():
                    async with self._store.database.lock("gate") as ours:
                        if ours:
                            await self.look()
            except (LightningError, OSError) as error:  # the next look may succeed
                log.warning("candidates cannot be weighed now: %s", error)
            except Exception:  # without a gate the trainer would wait for ever
                log.exception("candidates cannot be weighed")
            await asyncio.sleep(max(LOOK_S, self._read / PACE))

    async def look(self) -> None:
        """Weigh the rollouts so far, and decide if they are enough."""
        test = await self._tests.under_way()
        if test is None:
            return
        now, stamp = time.time(), await self._tests.stamp(test)
        if self._seen[:2] == (test.n, stamp) and now < self._seen[2]:
            return
        rollouts = await self._tests.observed(test)
        self._read += len(rollouts)
        if not rollouts and test.n not in self._without_evidence and await self._tests.has_others(test):
            self._without_evidence.add(test.n)
            log.warning("policy version %d: %s", test.version, NO_EVIDENCE)
        weighed = await in_thread_if_large(LARGE * len(rollouts), partial(weigh, test, rollouts, self._rules, now))
        if weighed.outcome == "promoted" and await self._store.steps.collapse() is not None:
            # A new live version would lift the stop, which only a person may.
            weighed = Weighed(weighed.evidence | {"waits": "publication is stopped for a collapse"}, None, "")
        if weighed.outcome is None:
            await self._tests.found(test, weighed.evidence)
        elif await self._tests.decide(test, weighed.outcome, weighed.reason, weighed.evidence):
            what = "is live" if weighed.outcome == "promoted" else "is taken back"
            log.warning("policy version %d %s after its test: %s", test.version, what, weighed.reason)
        self._seen = test.n, stamp, now + LOOK_ANYWAY_S


def rules(config: Config) -> GateRules:
    """Return the rules of tests. Siblings are those of the trainer."""
    gate, trainer = config.section(PromotionConfig), config.trainer
    return GateRules(
        metrics=metrics(gate, trainer.reward_weights),
        level=gate.level,
        max_rollouts=gate.max_rollouts,
        reward_timeout_s=gate.reward_timeout_s,
        group_size=trainer.group_size,
        group_timeout_s=trainer.group_timeout_s,
    )


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
    would look better than it is (docs/training.md).
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
    evidence = evidence_of(pairs, metric.margin, rules.level, len(rules.metrics))
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


class GuardedMetric(NamedTuple):
    """A metric that must not become worse. `value`: that of a rollout, None if it has none.

    `range`: its lowest and highest value; None where it has no bounds, so that only the order of two values counts.
    `is_reward`: higher is better, and a failed rollout has the lowest value. Of all others lower is better.
    """

    name: str
    margin: float
    value: Value
    range: tuple[float, float] | None = (0.0, 1.0)
    is_reward: bool = False

    def of(self, rollout: Observed) -> float | None:
        """Return the rollout's value; None if it has none, or none yet."""
        if self.is_reward and self.range is not None and rollout.status == "failed":
            return self.range[0]
        return self.value(rollout)

    def difference(self, candidate: Sequence[float], live: Sequence[float]) -> float:
        """Return how far the candidate's siblings are better than those of the live version: one pair, in [-1, 1]."""
        better, other = (candidate, live) if self.is_reward else (live, candidate)
        return sign_difference(better, other) if self.range is None else difference(better, other, *self.range)

    def is_clipped(self, value: float) -> bool:
        """Return whether a value is outside the range."""
        return self.range is not None and not self.range[0] <= value <= self.range[1]


def metrics(gate: PromotionConfig, weights: Mapping[str, float]) -> list[GuardedMetric]:
    """Return the metrics of a gate. `weights`: of rewards, as the trainer counts them."""
    found = []
    for name, margin in gate.metrics.items():
        if name in OWN:
            value, bounds = OWN[name]
            found.append(GuardedMetric(name, margin, value, bounds))
        else:
            counted = dict(weights) if name == TRAINED else {name: 1.0}
            bounds = gate.reward_ranges.get(name, gate.reward_range)
            found.append(GuardedMetric(name, margin, _rewarded(counted), bounds, is_reward=True))
    return found


def _rewarded(weights: Mapping[str, float]) -> Value:
    return lambda rollout: earned(rollout.rewards, Rules(weights, within=UNCUT)).returned
