"""Splits new rollouts between two versions, and decides whether the new one goes live (`promotion.mode: gated`).

Groups of siblings give pairs, pairs give evidence for each guarded metric, and the evidence gives a decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from ...core.config.root import Config
from ...core.errors import LightningError
from ...core.records import PolicyVersion, RolloutName
from ...core.returns import LARGEST, Rules, earned
from ...core.statistics import Evidence, difference, evidence_of, interval, sign_difference
from ...proxy.api.policy import Policy, VersionSeen
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from .config import PromotionConfig
from .promotions import LONE, NOT_GATED, Observed, Outcome, Promotion, Promotions, candidates_server

log = logging.getLogger(__name__)
LOOK_S = 1.0
PACE = 1_000  # rollouts that are read a second, at most: time that others take from a look must not put off the next
LOOK_ANYWAY_S = 10.0  # time alone settles rollouts without a reward
LEVEL = 0.05  # the greatest chance of a wrong decision
REWARD_WAIT_S = 1800.0  # a rollout that has no reward by then is left out
# Metrics that need no reward, and their range (None: only the order of two values counts). Of each, lower is better.
NO_REWARDS: Mapping[str, tuple[float, float] | None] = {
    "tool_errors": (0.0, 1.0),  # the share of tool calls that failed
    "truncated": (0.0, 1.0),  # the share of answers that were cut off
    "unrewarded": (0.0, 1.0),  # the share of rollouts without a reward
    "answer_tokens": None,  # on average over the rollout's calls
    "latency": None,  # milliseconds until an answer was complete, as above
}
TRAINED = "reward"  # what the trainer counts: named rewards, times their weights
SIDES = ("candidate", "live")
SiblingGroup = dict[str, list[Observed]]  # by side: siblings that are complete, or waited for no more


class Gate:
    """Promotes or rejects candidates by their metrics. All state is in the store, so a restart changes nothing."""

    def __init__(self, config: Config, store: Store, tests: Promotions) -> None:
        self._config, self._store, self._tests = config, store, tests
        self._seen: tuple[Any, ...] = ()  # changes when there is something new to weigh

    async def run(self) -> None:
        """Keep evaluating candidates until cancelled. Of several processes, only one does so at a time."""
        while True:
            read = 0
            try:
                if await self._tests.under_way():
                    async with self._store.database.lock("gate") as ours:
                        read = await self.look() if ours else 0
            except Exception as error:  # the next look may succeed; without a gate the trainer would wait for ever
                is_fault = not isinstance(error, (LightningError, OSError))
                log.warning("candidates cannot be evaluated now: %s", error, exc_info=is_fault)
            await asyncio.sleep(max(LOOK_S, read / PACE))

    async def look(self) -> int:
        """Evaluate the rollouts so far and, if they suffice, decide. Return how many were read."""
        now, test = time.time(), await self._tests.under_way()
        if test is None:
            return 0
        seen = test.n, await self._tests.stamp(test), now // LOOK_ANYWAY_S
        if seen == self._seen:
            return 0
        rollouts = await self._tests.observed(test)
        evidence, outcome, reason = await asyncio.to_thread(weigh, test, rollouts, self._config, now)
        if outcome == "promoted" and await self._store.steps.collapse() is not None:
            # A new live version would lift the stop, which only a person may.
            evidence, outcome = evidence | {"waits": "publishing has stopped after a collapse"}, None
        if outcome is None:
            await self._tests.found(test, evidence)
        elif await self._tests.decide(test, outcome, reason, evidence):
            log.warning("policy version %d is %s after its test: %s", test.version, outcome, reason)
        self._seen = seen
        return len(rollouts)


class GuardedMetric(NamedTuple):
    """A metric that must not become worse. Without a `range`, only order counts; without `rules`, lower is better."""

    name: str
    margin: float
    range: tuple[float, float] | None
    rules: Rules | None

    def of(self, rollout: Observed) -> float | None:
        """Return the rollout's value; None if it has none, or none yet."""
        if self.rules is None:
            value = getattr(rollout, self.name)
            return None if value is None else float(value)
        if self.range is not None and rollout.status == "failed":
            return self.range[0]
        return earned(rollout.rewards, self.rules).returned

    def compared(self, groups: Sequence[SiblingGroup], metrics: int) -> tuple[dict[str, Any], Evidence]:
        """Return numbers to store, and the evidence, from these groups. `metrics`: how many metrics are guarded."""
        pairs, seen = list[float](), {side: list[float]() for side in SIDES}
        for group in groups:
            values = {side: [v for one in group[side] if (v := self.of(one)) is not None] for side in SIDES}
            for side in SIDES:
                seen[side] += values[side]
            if all(values.values()):
                better, other = (values[side] for side in (SIDES if self.rules else reversed(SIDES)))
                if self.range is None:
                    pairs.append(sign_difference(better, other))
                else:
                    pairs.append(difference(better, other, *self.range))
        found, between = evidence_of(pairs, self.margin, LEVEL, metrics), interval(pairs, LEVEL, metrics)
        numbers = {
            "margin": self.margin, "pairs": found.pairs, "difference": found.mean, "e_drop": found.e_drop,
            "e_safe": found.e_safe, "verdict": found.verdict, "interval": between and [between.low, between.high],
        }  # fmt: skip
        return numbers | {side: fmean(values) if values else None for side, values in seen.items()}, found


def metrics_of(config: Config) -> list[GuardedMetric]:
    """Return the metrics that the gate guards. `reward` has the trainer's weights, but the gate's range."""
    gate, found = config.section(PromotionConfig), list[GuardedMetric]()
    for name, margin in gate.metrics.items():
        if name in NO_REWARDS:
            found.append(GuardedMetric(name, margin, NO_REWARDS[name], None))
        else:
            weights = dict(config.trainer.reward_weights) if name == TRAINED else {name: 1.0}
            rules = Rules(weights, within=(-LARGEST, LARGEST))  # a gate has a range of its own
            found.append(GuardedMetric(name, margin, gate.reward_range, rules))
    return found


class Weighed(NamedTuple):
    """A test's numbers, as stored, and its conclusion. `outcome` is None while the test continues."""

    evidence: dict[str, Any]
    outcome: Outcome | None
    reason: str


def weigh(test: Promotion, rollouts: Sequence[Observed], config: Config, now: float) -> Weighed:
    """Return the evidence from a test's compared rollouts so far, and the decision if it suffices."""
    most, metrics = config.section(PromotionConfig).max_rollouts, metrics_of(config)
    is_full = len(rollouts) >= most
    groups, are_all = _groups(test, rollouts, config, now, is_full)
    compared = {metric.name: metric.compared(groups, len(metrics)) for metric in metrics}
    evidence: dict[str, Any] = {"rollouts": len(rollouts), "max_rollouts": most, "groups": len(groups)}
    evidence["metrics"] = {name: numbers for name, (numbers, _) in compared.items()}
    for side, version in zip(SIDES, (test.version, test.against), strict=True):
        own = [one.status for one in rollouts if one.version == version]
        evidence[side] = {"rollouts": len(own), "failed": own.count("failed")}
    judged = {name: one for name, (_, one) in compared.items()}
    return Weighed(evidence, *_decision(judged, is_full and are_all))


def _groups(
    test: Promotion, rollouts: Sequence[Observed], config: Config, now: float, is_full: bool
) -> tuple[list[SiblingGroup], bool]:
    """The groups before the first that is still awaited (`_settled_at`), and whether these are all groups."""
    size, timeout_s = config.trainer.group_size, config.trainer.group_timeout_s
    rewards = [metric for metric in metrics_of(config) if metric.rules is not None]
    members: dict[tuple[Any, ...], list[Observed]] = defaultdict(list)
    for one in rollouts:
        number = one.place // (LONE if one.task_id is None else size)
        members[one.opened_by, one.task_id, number].append(one)
    groups = list[SiblingGroup]()
    for (_, task_id, _), siblings in members.items():
        # One that began when its group was waited for no more is left out: a pair that has counted does not change.
        pairs = enumerate(pairwise(siblings), 1)
        end = next((n for n, (one, other) in pairs if other.created_at > one.created_at + timeout_s), None)
        at, group = 0.0, SiblingGroup(candidate=[], live=[])
        for one in siblings[:end]:
            at = max(at, _settled_at(one, any(metric.of(one) is None for metric in rewards)))
            if one.alone and one.status != "discarded":
                group["candidate" if one.version == test.version else "live"].append(one)
        if end is None and len(siblings) < (LONE if task_id is None else size) and not is_full:
            at = max(at, siblings[-1].created_at + timeout_s)
        if at > now:
            break
        groups.append(group)
    return groups, len(groups) == len(members)


def _settled_at(rollout: Observed, missing: bool) -> float:
    """The time from which a rollout's values are final, or no longer awaited."""
    if rollout.ended_at is None:
        return rollout.created_at + REWARD_WAIT_S
    if missing and rollout.status == "completed":
        return rollout.ended_at + REWARD_WAIT_S
    return max([rollout.ended_at, *(reward.created_at or 0.0 for reward in rollout.rewards)])


def _decision(judged: Mapping[str, Evidence], is_over: bool) -> tuple[Outcome | None, str]:
    """The outcome for all metrics' evidence (None: undecided), and the reason. `is_over`: no rollouts will follow."""
    lines = {
        name: "no pair has a value" if one.mean is None else f"{one.mean:+.3f} on average over {one.pairs} pairs"
        for name, one in judged.items()
    }
    if worse := [name for name, one in judged.items() if one.verdict == "worse"]:
        return "rejected", "; ".join(f"{name} is worse: {lines[name]}" for name in worse)
    if all(one.verdict == "safe" for one in judged.values()):
        excluded = (f"{name}: {lines[name]}, a drop of {one.margin:g} is excluded" for name, one in judged.items())
        return "promoted", "; ".join(excluded)
    if not is_over:
        return None, ""
    low = [name for name, one in judged.items() if one.mean is None or one.mean < -one.margin / 2]
    bound = "with no value or a drop over half the margin" if low else "with no drop over half the margin"
    told = "; ".join(f"{name}: {lines[name]}" for name in low or judged)
    return ("rejected" if low else "promoted"), f"undecided at max_rollouts, {bound}: {told}"


class PolicyTest(BaseModel):
    """`promotion`: whether new versions are tested before they go live. `test`: the running test, if any."""

    promotion: Literal["immediate", "gated"]
    test: Promotion | None


class VersionTest(BaseModel):
    """`promotion`: the version's last test against a live one, with the numbers; null if there was none."""

    promotion: Promotion | None


class PromotionPlugin(ProxyPlugin):
    fields = ((Policy, PolicyTest), (VersionSeen, VersionTest))

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, store = self.config, core.store
        tests = Promotions(store.database)
        if not config.section(PromotionConfig).is_gated:
            await tests.end(NOT_GATED)
            yield Hooks()
            return

        async def choose(rollout: RolloutName, live: PolicyVersion) -> PolicyVersion:
            now = await tests.now()
            if now is None or now.promotion.against != live.version or rollout.mode == "eval":
                return live
            version = await tests.assign(now.promotion, rollout, config)
            return now.candidate if version == now.promotion.version else live

        gate = Gate(config, store, tests)
        yield Hooks(choose=choose, placed=candidates_server(config, tests), work=(gate.run,))

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        under_way = await Promotions(store.database).under_way() if key_id is None else None
        return {"promotion": self.config.section(PromotionConfig).mode, "test": under_way and asdict(under_way)}

    async def version_fields(self, store: Store, key_id: str | None) -> Callable[[int], Fields]:
        tests = await Promotions(store.database).last() if key_id is None else {}
        return lambda version: {"promotion": tests.get(version)}


plugin = PromotionPlugin
