"""Watches a training run for signs of collapse: falling rewards, or metrics of training steps out of bounds.

The store remembers that publication is stopped, and why.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from ..core.config.trainer import CollapseConfig, TrainerConfig
from ..core.records import CollapseSign, PolicyVersion
from ..core.returns import Rules
from ..store.store import Store
from ..store.training import Collapse, Step

log = logging.getLogger(__name__)

# The newest 1, 2, 4 and 8 versions are compared with those before: a reward falls at once, or little by little.
SPLITS = (1, 2, 4, 8)

# The fewest rollouts (or tasks) on each side of a comparison.
MIN_COMPARED = 8
FEW = 6  # makes the variance between few groups larger, as Student's t has longer tails
FAR = 30.0  # more sigmas count as this: they are as good as certain, and their tail is too small for a float

WORDS: Mapping[str, str] = {
    "clip_share": "the share of clipped tokens",
    "kl": "the KL divergence of the samplers from the policy",
    "kl_base": "the KL divergence from the base model",
}

# The power of staleness by which each limit grows. The KL divergence of a small change is quadratic in the change.
POWER_OF_STALENESS: Mapping[str, int] = {"clip_share": 1, "kl": 2, "kl_base": 0}

# No limit grows further than this: a share cannot exceed 1, and at 5 nats a token little is left of a policy.
MOST: Mapping[str, float] = {"clip_share": 0.9, "kl": 5.0, "kl_base": math.inf}

# More sigmas than this can hardly be seen, whatever happens (`FAR`).
MOST_SIGMAS = 25.0

LINE = 32  # the number of steps to look back
FIRST = 3  # the number of steps that entropy and reward at the beginning are taken from
NEWEST = 1024  # the number of rollouts to look at
SETTLED = 0.9  # the share of rollouts that were rewarded within the time to wait for


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of collapse from policy version `since` on; `what` says it in words. `collapsed`: enough to stop for."""

    name: CollapseSign
    what: str
    since: int
    collapsed: bool


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout's reward, its task (None: it has none), and the policy version that it began with."""

    version: int
    task_id: str | None
    reward: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The metrics of a training step, and the policy version that it began with, which they measure."""

    version: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Drop:
    """The fall of the mean reward from `before` to `after`, with `compared` rollouts or tasks on each side.

    `lowest` is the lowest reward among them. Shifting or scaling all rewards changes nothing.
    """

    sigmas: float
    before: float
    after: float
    compared: int
    lowest: float

    @property
    def share(self) -> float:
        """Return the share that was lost of the mean's height above the lowest reward."""
        height = self.before - self.lowest
        return (self.before - self.after) / height if height > 0 else 0.0


class _Unit(NamedTuple):
    """A reward, and its group among those of its task: the version that it began with; None if it has no group."""

    reward: float
    group: int | None


Stratum = tuple[Sequence[_Unit], Sequence[_Unit]]  # before and after, oldest first


def kept(line: Sequence[int]) -> set[int]:
    """Return the versions of a line, newest first, to keep for a rollback: 1, 2-3, 4-7 and 8-15 versions back.

    A version that is 8 back was 4, 2 and 1 back before, and was chosen each time.
    """
    return {next((version for version in line[n:] if version % n == 1 % n), 0) for n in SPLITS}


def reward_sign(scored: Sequence[ScoredRollout], line: Sequence[int], config: CollapseConfig) -> Sign | None:
    """Return the greatest drop of the reward along a line of versions, newest first. `scored` is as opened."""
    drops: list[tuple[Drop, int]] = []
    for newest in (n for n in SPLITS if n < len(line)):
        after, before = set(line[:newest]), set(line[newest:])
        found = drop([s for s in scored if s.version in before], [s for s in scored if s.version in after])
        if found.compared >= MIN_COMPARED:
            drops.append((found, line[newest - 1]))
    if not drops:
        return None
    worth = [of_several(found.sigmas, len(drops)) for found, _ in drops]
    enough = [s >= config.reward_stop and d.share >= config.min_drop for s, (d, _) in zip(worth, drops, strict=True)]
    collapsed, sigmas, (worst, since) = max(zip(enough, worth, drops, strict=True), key=lambda one: one[:2])
    if sigmas < config.reward_warn:
        return None
    what = (
        f"the reward fell from {worst.before:.3g} to {worst.after:.3g} with policy version {since} "
        f"({sigmas:.1f} sigmas, {worst.compared} compared with {worst.compared})"
    )
    return Sign("reward", what, since, collapsed)


def drop(before: Sequence[ScoredRollout], after: Sequence[ScoredRollout]) -> Drop:
    """Compare rewards before and after: within each task that has both, and by the means of all other tasks.

    This is a stratified permutation test (Mantel 1963, J. Am. Stat. Assoc. 58:690): if the policy were the same, the
    order of a task's rewards would be chance. No variance is estimated from one side alone, so each side's rewards may
    be all equal. Both sides of a stratum are made equally large (the newest from before, a spread from after). That
    makes the test symmetric, and rare rewards raise no alarm. Rollouts of a group are alike, so the variance is at
    least that between groups (`_between_groups`).
    """
    grouped, lowest = list[Stratum](), math.inf
    fallen = alone = alike = first = second = 0.0
    compared = 0
    for left, right in _strata(before, after):
        size = min(len(left), len(right))
        if size:
            old, new = left[-size:], [right[i * len(right) // size] for i in range(size)]
            rewards = [one.reward for one in (*old, *new)]
            left_sum, right_sum = math.fsum(rewards[:size]), math.fsum(rewards[size:])
            first, second, compared = first + left_sum, second + right_sum, compared + size
            fallen += (left_sum - right_sum) / 2
            spread = size / 2 * _variance(rewards)
            lowest = min(lowest, *rewards)
            if old[0].group is None:
                alone += spread
            else:
                alike += spread
                grouped.append((old, new))
    spread = alone + max(alike, _between_groups(grouped, 2 * fallen / max(compared, 1)))
    sigmas = fallen / math.sqrt(spread) if spread > 0 else 0.0
    return Drop(sigmas, first / max(compared, 1), second / max(compared, 1), compared, lowest)


def _between_groups(strata: Sequence[Stratum], fall: float) -> float:
    """Estimate the variance of the sum in `drop` from groups, where all of them fell by `fall` but for chance.

    This is the cluster-robust variance (Liang & Zeger 1986, Biometrika 73:13) with a group as a cluster: the rollouts
    of one task that began with one version. 0 where there are too few groups to tell.
    """
    total, freedom = 0.0, -1
    for old, new in strata:
        middle = fmean(one.reward for one in (*old, *new))
        residuals: dict[int | None, float] = {}
        for units, side in ((old, 0.5), (new, -0.5)):
            for one in units:
                residuals[one.group] = residuals.get(one.group, 0.0) + side * (one.reward - middle - side * fall)
        groups = len(residuals)
        freedom += groups - 1
        total += groups / (groups - 1) * math.fsum(r**2 for r in residuals.values())
    return total * (freedom + FEW) / freedom if freedom > 0 else 0.0


def of_several(sigmas: float, tests: int) -> float:
    """Return the sigmas of the greatest of several results, corrected for their number (Bonferroni)."""
    tail = math.erfc(min(sigmas, FAR) / math.sqrt(2)) / 2
    return -NormalDist().inv_cdf(min(tests * tail, 0.5))


def _strata(before: Sequence[ScoredRollout], after: Sequence[ScoredRollout]) -> Iterator[Stratum]:
    """A stratum for each task on both sides (rollouts without a task are one), and one of the other tasks' means."""
    old, new = _by_task(before), _by_task(after)
    shared = old.keys() & new.keys()
    for task in shared:
        yield old[task], new[task]
    yield [_mean(old[t]) for t in old if t not in shared], [_mean(new[t]) for t in new if t not in shared]


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _mean(of_task: Sequence[_Unit]) -> _Unit:
    return _Unit(fmean(one.reward for one in of_task), None)


def _by_task(scored: Sequence[ScoredRollout]) -> dict[str | None, list[_Unit]]:
    """The rewards by task. Rollouts without a task are in no group."""
    found: dict[str | None, list[_Unit]] = {}
    for one in scored:
        group = None if one.task_id is None else one.version
        found.setdefault(one.task_id, []).append(_Unit(one.reward, group))
    return found


def step_signs(steps: Sequence[Measured], first: Sequence[Mapping[str, Any]], config: CollapseConfig) -> list[Sign]:
    """Return the metrics out of bounds in the newest of `steps` (newest first). `first` are the run's first steps."""
    limits = {"clip_share": config.max_clip_share, "kl": config.max_kl, "kl_base": config.max_kl_base}
    signs = [_too_high(name, limit, steps, config) for name, limit in limits.items() if limit is not None]
    signs.append(_entropy_sign(steps, first, config))
    return [sign for sign in signs if sign is not None]


def _too_high(name: Any, limit: float, steps: Sequence[Measured], config: CollapseConfig) -> Sign | None:
    """A metric over its limit. It grows with staleness, up to MOST: older versions are farther from the policy."""

    def allowed(metrics: Mapping[str, Any]) -> float:
        grown = limit * max(1.0, metrics.get("staleness_mean", 0.0)) ** POWER_OF_STALENESS[name]
        return float(max(limit, min(grown, MOST[name])))

    streak = _streak(steps, lambda metrics: metrics.get(name, 0.0) > allowed(metrics))
    if not streak:
        return None
    what = f"{WORDS[name]} is {streak[0].metrics[name]:.3g}, over {allowed(streak[0].metrics):.3g}"
    return _sign(name, what, streak, config)


def _entropy_sign(steps: Sequence[Measured], first: Sequence[Mapping[str, Any]], config: CollapseConfig) -> Sign | None:
    """Low entropy without a higher reward. A policy that learns pays for rewards with entropy (arXiv 2505.22617).

    Only rollouts that were sampled since the entropy is low count.
    """
    entropies = [metrics["entropy"] for metrics in first if "entropy" in metrics]
    if not entropies:
        return None
    start = max(entropies)
    streak = _streak(steps, lambda metrics: metrics.get("entropy", start) < config.min_entropy * start)
    after = [s.metrics for i, s in enumerate(streak) if s.metrics.get("staleness_mean", 0.0) < len(streak) - i]
    if not after or _has_risen(first, after, config.reward_warn):
        return None
    now = streak[0].metrics
    what = (
        f"the entropy is {now['entropy']:.3g}, {now['entropy'] / start:.0%} of what it was in the first steps, and the "
        f"reward is no higher than then ({now.get('reward_mean', 0.0):.3g})"
    )
    return _sign("entropy", what, streak, config)


def _streak(steps: Sequence[Measured], is_bad: Callable[[Mapping[str, Any]], bool]) -> list[Measured]:
    return list(takewhile(lambda step: is_bad(step.metrics), steps))


def _sign(name: CollapseSign, what: str, streak: Sequence[Measured], config: CollapseConfig) -> Sign:
    in_a_row = f"{len(streak)} steps in a row" if len(streak) > 1 else "in the last step"
    return Sign(name, f"{what} ({in_a_row})", streak[-1].version, len(streak) >= config.steps)


def _has_risen(first: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], sigmas: float) -> bool:
    """Whether the mean reward is higher than in the first steps by more than `sigmas` standard errors, or unknown."""
    if not all(any(m.get("rollouts_counted", 1) for m in steps) for steps in (first, now)):
        return True
    (old, old_error), (new, new_error) = _mean_and_error(first), _mean_and_error(now)
    return new - old > sigmas * math.hypot(old_error, new_error)


def _mean_and_error(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The mean and its standard error over all rewards of these steps that act on everybody."""
    names = ("rollouts_counted", "counted_mean", "counted_std"), ("rollouts", "reward_mean", "reward_std")
    of = [[m[name] for name in names["rollouts_counted" not in m]] for m in steps if m.get("rollouts")]
    of = [one for one in of if one[0]]
    count = sum(n for n, _, _ in of)
    if not count:
        return 0.0, math.inf
    mean = math.fsum(n * m for n, m, _ in of) / count
    squares = math.fsum(n * (s**2 + (m - mean) ** 2) for n, m, s in of)
    return mean, math.sqrt(squares) / count


class Monitor:
    """Monitors one training loop for collapse. All its state is in the store, so a restart changes nothing."""

    def __init__(self, config: TrainerConfig, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        watched, clipped = config.collapse, config.collapse.max_clip_share
        if config.importance_level == "sequence":  # where many ratios are clipped as a rule (arXiv 2507.18071)
            clipped = None
        # A limit that nothing can exceed would watch nothing.
        self._watched = watched.model_copy(
            update={
                "reward_warn": min(watched.reward_warn, MOST_SIGMAS),
                "reward_stop": min(watched.reward_stop, MOST_SIGMAS),
                "steps": min(watched.steps, LINE),
                "max_clip_share": None if clipped is None else min(clipped, MOST["clip_share"]),
            }
        )
        self._store = store
        self._clock = clock
        self._looked_at: object = None
        self._look_again = math.inf  # when more rollouts will count, even without a new reward
        self._logged: Collapse | None = None

    async def keep(self) -> set[int]:
        """Return the versions that a rollback may go to from the live one. Their files must stay."""
        if self._config.collapse.action == "off":
            return set()
        live = (await self._store.versions.live()).version
        return kept(_versions(live, await self._line(live)))

    async def of_step(self, base: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return metrics to add to a step that began with version `base`, before it is committed.

        `warnings` has a text for each sign that was seen. With `collapse`, the step must not be published.
        """
        live = await self._store.versions.live()
        if self._config.collapse.action == "off" or metrics["skipped"] or live.version != base:
            return {}
        line = await self._line(base)
        steps = [Measured(base, metrics), *(Measured(step.base, step.metrics) for step in line)]
        first = [step.metrics for step in await self._store.steps.first(FIRST)]
        signs = step_signs(steps, first, self._watched)
        for sign in signs:
            log.warning("policy version %d may be collapsing: %s", base, sign.what)
        warnings = {"warnings": {sign.name: sign.what for sign in signs}} if signs else {}
        return warnings | await self._stopped(signs, live, _versions(base, line))

    async def look(self) -> Collapse | None:
        """Return the collapse for which publication is stopped, or None. Check the rewards since the last look."""
        live, last = await self._store.versions.live(), await self._store.steps.last()
        if self._config.collapse.action == "off" or last is None:
            return None
        found = Collapse.of(last, live) or await self._look_at_rewards(live, last)
        if found is not None and found != self._logged:
            log.error("publication is stopped: %s", found.story)
        self._logged = found
        return found

    async def _look_at_rewards(self, live: PolicyVersion, last: Step) -> Collapse | None:
        """A collapse seen in rewards alone: if all rewards are equal, no step is taken whose metrics could show it."""
        looked_at = (await self._store.rewards.newest(), live.version, live.live_at)
        if looked_at == self._looked_at and self._clock() < self._look_again:
            return None
        self._looked_at = looked_at
        line = _versions(live.version, await self._line(live.version))
        sign = reward_sign(await self._scored(line[-1]), line, self._watched)
        if sign is None:
            return None
        return await self._report(sign, live, last, await self._stopped([sign], live, line))

    async def _report(self, sign: Sign, live: PolicyVersion, last: Step, stopped: dict[str, Any]) -> Collapse | None:
        warnings = last.metrics.get("warnings", {})
        if sign.name not in warnings or stopped:
            log.warning("policy version %d may be collapsing: %s", live.version, sign.what)
            metrics = last.metrics | {"warnings": {**warnings, sign.name: sign.what}} | stopped
            await self._store.steps.update_metrics(last.step, metrics)
        return Collapse(**stopped["collapse"]) if stopped else None

    async def _stopped(self, signs: Sequence[Sign], live: PolicyVersion, line: Sequence[int]) -> dict[str, Any]:
        """The metric `collapse`, if one of the signs is enough to stop for; else nothing."""
        sign = next((sign for sign in signs if sign.collapsed), None)
        if sign is None or self._config.collapse.action == "warn":
            return {}
        go_back_to = await self._last_before(sign.since, line)
        return {"collapse": asdict(Collapse(sign.name, sign.what, time.time(), live.live_at, go_back_to))}

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
        return list(_led_to(version, await self._store.steps.newest(LINE)))

    async def _scored(self, since: int) -> list[ScoredRollout]:
        """The newest rollouts of versions from `since` on, with their weighted posted rewards that act on everybody.

        Judge scores do not count: only what is trained on has them, which would set versions apart. Rollouts count once
        they are older than most rollouts took, because failures may be quicker than successes.
        """
        await self._store.rewards.use(Rules.of(self._config))
        found = await self._store.rewards.since(since, NEWEST)
        took = sorted(one.done - one.began for one in found) or [0.0]
        wait = took[int(SETTLED * len(took))]
        settled = self._clock() - wait
        self._look_again = max((one.began + wait for one in found if one.began > settled), default=math.inf)
        return [ScoredRollout(one.version, one.task_id, one.reward) for one in found if one.began <= settled]


def _led_to(version: int, steps: Sequence[Step]) -> Iterator[Step]:
    """Those of `steps`, newest first, that led to a version."""
    for step in steps:
        if "collapse" in step.metrics:
            return
        # The step changed nothing, or its trainer was killed before it was published.
        if step.metrics.get("skipped") or (step.version is None and step.base == version):
            continue
        if step.version != version:
            return
        yield step
        version = step.base


def _versions(version: int, line: Sequence[Step]) -> list[int]:
    """A version and those that led to it, newest first."""
    return [version, *(step.base for step in line)]
