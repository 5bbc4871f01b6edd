"""Watches a training run for signs of collapse: falling rewards, or metrics of training steps out of bounds.

The store remembers that publication is stopped, and why.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from ..core.config.trainer import CollapseConfig, TrainerConfig
from ..core.records import CollapseSign, PolicyVersion
from ..core.returns import Rules
from ..store.rewards import Scored
from ..store.store import Store
from ..store.training import Collapse, Step

log = logging.getLogger(__name__)

# The newest 1, 2, 4 and 8 versions are compared with those before: a reward falls at once, or little by little.
SPLITS = (1, 2, 4, 8)
MIN_COMPARED = 8  # rollouts (or tasks) on each side of a comparison
FEW = 6  # makes the variance between few groups larger, as Student's t has longer tails
FAR = 30.0  # more sigmas count as this: they are as good as certain, and their tail is too small for a float
MOST_CLIPPED = 0.9  # a share cannot exceed 1

LINE = 32  # the number of steps to look back
FIRST = 3  # the number of steps that entropy and reward at the beginning are taken from
NEWEST = 1024  # the number of rollouts to look at
RELOOK_S = 60  # more rollouts may count by then, even without a new reward
SETTLED = 0.9  # the share of rollouts that were rewarded within the time to wait for

Metrics = Mapping[str, Any]


class Limit(NamedTuple):
    """The most that a metric may be: the value of `setting`, times this power of the rollouts' staleness.

    The KL divergence of a small change is quadratic in the change. No limit grows past `most`: at 5 nats a token little
    is left of a policy.
    """

    setting: str
    words: str
    power: int
    most: float


LIMITS: Mapping[CollapseSign, Limit] = {
    "clip_share": Limit("max_clip_share", "the share of clipped tokens", 1, MOST_CLIPPED),
    "kl": Limit("max_kl", "the KL divergence of the samplers from the policy", 2, 5.0),
    "kl_base": Limit("max_kl_base", "the KL divergence from the base model", 0, math.inf),
}


class Sign(NamedTuple):
    """A sign of collapse from policy version `since` on; `what` says it in words. `collapsed`: enough to stop for."""

    name: CollapseSign
    what: str
    since: int
    collapsed: bool


class Measured(NamedTuple):
    """The metrics of a training step, and the policy version that it began with, which they measure."""

    version: int
    metrics: Metrics


class Drop(NamedTuple):
    """The fall of the mean reward from `before` to `after`, with `compared` rollouts or tasks on each side.

    `share`: of the mean's height above the lowest reward. Shifting or scaling all rewards changes no sigmas.
    """

    sigmas: float
    before: float
    after: float
    compared: int
    share: float


# Rewards --------------------------------------------------------------------------------------------------------------


def kept(line: Sequence[int]) -> set[int]:
    """Return the versions of a line, newest first, to keep for a rollback: 1, 2-3, 4-7 and 8-15 versions back.

    A version that is 8 back was 4, 2 and 1 back before, and was chosen each time.
    """
    return {next((version for version in line[n:] if version % n == 1 % n), 0) for n in SPLITS}


def reward_sign(scored: Sequence[Scored], line: Sequence[int], config: CollapseConfig) -> Sign | None:
    """Return the greatest drop of the reward along a line of versions, newest first. `scored` is as opened."""
    drops = [
        (drop(*([s for s in scored if s.version in part] for part in (line[newest:], line[:newest]))), line[newest - 1])
        for newest in SPLITS
        if newest < len(line)
    ]
    drops = [(found, since) for found, since in drops if found.compared >= MIN_COMPARED]
    signs: list[tuple[bool, float, Sign]] = []
    for found, since in drops:
        sigmas = of_several(found.sigmas, len(drops))
        if sigmas >= config.reward_warn:
            what = (
                f"the reward fell from {found.before:.3g} to {found.after:.3g} with policy version {since} "
                f"({sigmas:.1f} sigmas, {found.compared} compared with {found.compared})"
            )
            collapsed = sigmas >= config.reward_stop and found.share >= config.min_drop
            signs.append((collapsed, sigmas, Sign("reward", what, since, collapsed)))
    return max(signs)[2] if signs else None


def drop(before: Sequence[Scored], after: Sequence[Scored]) -> Drop:
    """Compare rewards before and after: within each task that has both, and by the means of all other tasks.

    This is a stratified permutation test (Mantel 1963, J. Am. Stat. Assoc. 58:690): if the policy were the same, the
    order of a task's rewards would be chance. No variance is estimated from one side alone, so each side's rewards may
    be all equal. Both sides of a stratum are made equally large (the newest from before, a spread from after). That
    makes the test symmetric, and rare rewards raise no alarm.

    Rollouts of a group are alike, so the variance is at least that between groups: the cluster-robust variance (Liang &
    Zeger 1986, Biometrika 73:13), where a group is the rollouts of one task that began with one version. It is 0 where
    there are too few groups to tell.
    """
    of_alone, of_alike, pairs, lowest = 0.0, 0.0, list[tuple[float, float]](), math.inf
    groups: list[tuple[Any, Any, list[int]]] = []  # residuals, sides and versions of a task's rewards
    for old, new in _strata(before, after):
        size = min(len(old), len(new))
        units = [*old[len(old) - size :], *(new[i * len(new) // size] for i in range(size))]
        rewards, side = np.array([one.reward for one in units]), np.repeat((0.5, -0.5), size)
        if size:
            pairs += zip(rewards[:size].tolist(), rewards[size:].tolist(), strict=True)
            lowest, spread = min(lowest, float(rewards.min())), size / 2 * float(rewards.var(ddof=1))
            if units[0].task_id is None:
                of_alone += spread
            else:
                of_alike += spread
                groups.append((rewards - rewards.mean(), side, [one.version for one in units]))
    compared = len(pairs)
    first, second = (math.fsum(rewards) / compared for rewards in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    between, freedom = 0.0, -1
    for residuals, side, versions in groups:
        sums = np.bincount(np.unique(versions, return_inverse=True)[1], side * residuals - (first - second) / 4)
        between += len(sums) / (len(sums) - 1) * float(sums @ sums)
        freedom += len(sums) - 1
    spread = of_alone + max(of_alike, between * (freedom + FEW) / freedom if freedom > 0 else 0.0)
    sigmas = compared * (first - second) / 2 / math.sqrt(spread) if spread > 0 else 0.0
    return Drop(sigmas, first, second, compared, (first - second) / (first - lowest) if first > lowest else 0.0)


def of_several(sigmas: float, tests: int) -> float:
    """Return the sigmas of the greatest of several results, corrected for their number (Bonferroni)."""
    tail = math.erfc(min(sigmas, FAR) / math.sqrt(2)) / 2
    return -NormalDist().inv_cdf(min(tests * tail, 0.5))


def _strata(before: Sequence[Scored], after: Sequence[Scored]) -> Iterator[list[list[Scored]]]:
    """A stratum for each task on both sides (rollouts without a task are one), and one of the other tasks' means."""
    sides: list[dict[str | None, list[Scored]]] = [defaultdict(list), defaultdict(list)]
    for side, scored in zip(sides, (before, after), strict=True):
        for one in scored:
            side[one.task_id].append(one)
    shared = sides[0].keys() & sides[1].keys()
    for task in shared:
        yield [side[task] for side in sides]
    yield [
        [Scored(0, None, fmean(one.reward for one in side[task]), 0.0, 0.0) for task in side if task not in shared]
        for side in sides
    ]


# Steps ----------------------------------------------------------------------------------------------------------------


def step_signs(steps: Sequence[Measured], first: Sequence[Metrics], config: CollapseConfig) -> list[Sign]:
    """Return the metrics out of bounds in the newest of `steps` (newest first). `first` are the run's first steps."""
    signs = [*(_too_high(name, steps, config) for name in LIMITS), _entropy_sign(steps, first, config)]
    return [sign for sign in signs if sign is not None]


def _too_high(name: CollapseSign, steps: Sequence[Measured], config: CollapseConfig) -> Sign | None:
    limit: float | None = getattr(config, LIMITS[name].setting)
    if limit is None:
        return None

    def allowed(metrics: Metrics) -> float:
        grown = limit * max(1.0, metrics.get("staleness_mean", 0.0)) ** LIMITS[name].power
        return float(max(limit, min(grown, LIMITS[name].most)))

    streak = _streak(steps, lambda metrics: metrics.get(name, 0.0) > allowed(metrics))
    if not streak:
        return None
    now = streak[0].metrics
    return _sign(name, f"{LIMITS[name].words} is {now[name]:.3g}, over {allowed(now):.3g}", streak, config)


def _entropy_sign(steps: Sequence[Measured], first: Sequence[Metrics], config: CollapseConfig) -> Sign | None:
    """Low entropy without a higher reward. A policy that learns pays for rewards with entropy (arXiv 2505.22617).

    Only rollouts that were sampled since the entropy is low count.
    """
    start = max((metrics["entropy"] for metrics in first if "entropy" in metrics), default=0.0)
    streak = _streak(steps, lambda metrics: metrics.get("entropy", start) < config.min_entropy * start)
    since = [s.metrics for i, s in enumerate(streak) if s.metrics.get("staleness_mean", 0.0) < len(streak) - i]
    (old, old_error), (new, new_error) = _mean_reward(first), _mean_reward(since)
    if not new_error < math.inf > old_error or new - old > config.reward_warn * math.hypot(old_error, new_error):
        return None
    now = streak[0].metrics
    what = (
        f"the entropy is {now['entropy']:.3g}, {now['entropy'] / start:.0%} of what it was in the first steps, and the "
        f"reward is no higher than then ({new:.3g})"
    )
    return _sign("entropy", what, streak, config)


def _streak(steps: Sequence[Measured], is_bad: Callable[[Metrics], bool]) -> list[Measured]:
    return list(takewhile(lambda step: is_bad(step.metrics), steps))


def _sign(name: CollapseSign, what: str, streak: Sequence[Measured], config: CollapseConfig) -> Sign:
    in_a_row = f"{len(streak)} steps in a row" if len(streak) > 1 else "in the last step"
    return Sign(name, f"{what} ({in_a_row})", streak[-1].version, len(streak) >= config.steps)


def _mean_reward(steps: Sequence[Metrics]) -> tuple[float, float]:
    """The mean reward that acts on everybody in these steps, and its standard error: infinite without any."""
    counted = [metrics for metrics in steps if metrics.get("rollouts_counted")]
    if not counted:
        return 0.0, math.inf
    errors = [metrics["counted_std"] / math.sqrt(metrics["rollouts_counted"]) for metrics in counted]
    return fmean(metrics["counted_mean"] for metrics in counted), math.hypot(*errors) / len(counted)


# The monitor ----------------------------------------------------------------------------------------------------------


class Monitor:
    """Monitors one training loop for collapse. All its state is in the store, so a restart changes nothing."""

    def __init__(self, config: TrainerConfig, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._rules, self._store, self._clock = Rules.of(config), store, clock
        limits: dict[str, Any] = {"steps": min(config.collapse.steps, LINE)}
        if config.collapse.action == "warn":  # nothing is enough to stop for
            limits = {"steps": math.inf, "reward_stop": math.inf}
        # Sequences are clipped as a rule (arXiv 2507.18071). A limit that nothing can exceed would watch nothing.
        clipped = None if config.importance_level == "sequence" else config.collapse.max_clip_share
        limits["max_clip_share"] = clipped and min(clipped, MOST_CLIPPED)
        self._config = config.collapse.model_copy(update=limits)
        self._looked_at: object = None
        self._logged: Collapse | None = None

    async def keep(self) -> set[int]:
        """Return the versions that a rollback may go to from the live one. Their files must stay."""
        if self._config.action == "off":
            return set()
        live = (await self._store.versions.live()).version
        return kept(_versions(live, await self._line(live)))

    async def of_step(self, base: int, metrics: Metrics) -> dict[str, Any]:
        """Return the metrics to add to a step that began with version `base`, before it is committed.

        `warnings` has a text for each sign that was seen. With `collapse`, the step must not be published.
        """
        live = await self._store.versions.live()
        if self._config.action == "off" or metrics["skipped"] or live.version != base:
            return {}
        line = await self._line(base)
        steps = [Measured(base, metrics), *(Measured(step.base, step.metrics) for step in line)]
        first = [step.metrics for step in await self._store.steps.first(FIRST)]
        return await self._report(step_signs(steps, first, self._config), live, _versions(base, line))

    async def look(self) -> Collapse | None:
        """Return the collapse for which publication is stopped, or None. Check the rewards since the last look.

        A collapse may be seen in rewards alone: if all are equal, no step is taken whose metrics could show it.
        """
        live, last = await self._store.versions.live(), await self._store.steps.last()
        if self._config.action == "off" or last is None:
            return None
        found = Collapse.of(last, live)
        looked_at = await self._store.rewards.newest(), live.version, live.live_at, self._clock() // RELOOK_S
        if found is None and looked_at != self._looked_at:
            self._looked_at = looked_at
            line = _versions(live.version, await self._line(live.version))
            sign = reward_sign(await self._scored(line[-1]), line, self._config)
            seen = last.metrics.get("warnings", {})
            if sign is not None and (sign.collapsed or sign.name not in seen):
                metrics = await self._report([sign], live, line)
                metrics["warnings"] = {**seen, **metrics["warnings"]}
                await self._store.steps.update_metrics(last.step, last.metrics | metrics)
                found = Collapse(**metrics["collapse"]) if "collapse" in metrics else None
        if found is not None and found != self._logged:
            log.error("publication is stopped: %s", found.story)
        self._logged = found
        return found

    async def _report(self, signs: Sequence[Sign], live: PolicyVersion, line: Sequence[int]) -> dict[str, Any]:
        """Log these signs. Return them as metrics, with `collapse` if one of them is enough to stop for."""
        for sign in signs:
            log.warning("policy version %d may be collapsing: %s", live.version, sign.what)
        metrics: dict[str, Any] = {"warnings": {sign.name: sign.what for sign in signs}} if signs else {}
        if stops := next((sign for sign in signs if sign.collapsed), None):
            go_back_to = await self._last_before(stops.since, line)
            metrics["collapse"] = asdict(Collapse(stops.name, stops.what, time.time(), live.live_at, go_back_to))
        return metrics

    async def _last_before(self, version: int, line: Sequence[int]) -> int:
        """The newest version of the line before this one that can be served, or else the oldest since.

        The base model can always be served. It counts only if it was the one before, or if nothing else can be served.
        """
        before = [v for v in line if v < version]
        if before == [0]:
            return 0
        for earlier in [*before, *reversed(line[1:])]:
            if earlier and (await self._store.versions.get(earlier)).path is not None:
                return earlier
        return 0

    async def _line(self, version: int) -> list[Step]:
        """The steps that led to a version, newest first, back to a collapse or to a version made live by hand."""
        line: list[Step] = []
        for step in await self._store.steps.newest(LINE):
            # It changed nothing, or its trainer was killed before it was published.
            without_effect = step.metrics.get("skipped") or (step.version is None and step.base == version)
            if "collapse" in step.metrics or not (without_effect or step.version == version):
                break
            if not without_effect:
                line.append(step)
                version = step.base
        return line

    async def _scored(self, since: int) -> list[Scored]:
        """The newest rollouts of versions from `since` on, with their weighted posted rewards that act on everybody.

        Judge scores do not count: only what is trained on has them, which would set versions apart. Rollouts count once
        they are older than most rollouts took, because failures may be quicker than successes.
        """
        await self._store.rewards.use(self._rules)
        found = await self._store.rewards.since(since, NEWEST)
        took = sorted(one.done - one.began for one in found) or [0.0]
        settled = self._clock() - took[int(SETTLED * len(took))]
        return [one for one in found if one.began <= settled]


def _versions(version: int, line: Sequence[Step]) -> list[int]:
    """A version and those that led to it, newest first."""
    return [version, *(step.base for step in line)]
