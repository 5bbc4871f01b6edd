"""Watches a training run for signs of collapse: falling rewards, or metrics of training steps out of bounds.

The store remembers that publishing has stopped, and why.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from ..core.config.trainer import CollapseConfig, TrainerConfig
from ..core.records import CollapseSign, PolicyVersion
from ..core.returns import Rules
from ..store.rewards import Scored
from ..store.store import Store
from ..store.training import Collapse

log = logging.getLogger(__name__)

# The newest 1, 2, 4 and 8 versions are compared with those before: a reward falls at once, or little by little.
SPLITS = (1, 2, 4, 8)
MIN_COMPARED = 8  # rollouts (or tasks) on each side of a comparison
FEW = 6  # makes the variance between few groups larger, as Student's t has longer tails
FAR = 30.0  # more sigmas count as this: they are as good as certain, and their tail is too small for a float
MOST_CLIPPED = 0.9  # a share cannot exceed 1

LINE = 32  # the number of steps to look back
NEWEST = 1024  # the number of rollouts to look at
RELOOK_S = 60  # more rollouts may count by then, even without a new reward
SETTLED = 0.9  # the share of rollouts that were rewarded within the time to wait for
WARN = 3.0  # sigmas of a drop that warns
STEPS = 3  # with a metric out of bounds in a row are a collapse

Metrics = Mapping[str, Any]


class Sign(NamedTuple):
    """A sign of collapse since policy version `since`. `what`: its description. `collapsed`: it stops publishing."""

    name: CollapseSign
    what: str
    since: int
    collapsed: bool


class Measured(NamedTuple):
    """The metrics of a training step. They measure `version`, the policy version that the step began with."""

    version: int
    metrics: Metrics


class Drop(NamedTuple):
    """The fall of the mean reward from `before` to `after`, with `compared` rollouts or tasks on each side.

    `share`: the fall divided by (`before` - the lowest reward). `sigmas`: the fall in standard deviations.
    """

    sigmas: float = 0.0
    before: float = 0.0
    after: float = 0.0
    compared: int = 0
    share: float = 0.0


# Rewards --------------------------------------------------------------------------------------------------------------


def reward_sign(scored: Sequence[Scored], line: Sequence[int], config: CollapseConfig) -> Sign | None:
    """Return a sign for the clearest drop in `scored` (oldest first) along `line` (newest version first), if any."""
    drops: list[tuple[int, Drop]] = []
    for newest in (n for n in SPLITS if n < len(line)):
        before, after = ([one for one in scored if one.version in part] for part in (line[newest:], line[:newest]))
        if (fallen := drop(before, after)).compared >= MIN_COMPARED:
            drops.append((line[newest - 1], fallen))
    signs: list[tuple[bool, float, Sign]] = []
    for since, fallen in drops:
        tail = math.erfc(min(fallen.sigmas, FAR) / math.sqrt(2)) / 2
        sigmas = -NormalDist().inv_cdf(min(len(drops) * tail, 0.5))  # the greatest of several (Bonferroni)
        collapsed = config.action != "warn" and sigmas >= config.reward_stop and fallen.share >= config.min_drop
        what = (
            f"the reward fell from {fallen.before:.3g} to {fallen.after:.3g} with policy version {since} "
            f"({sigmas:.1f} sigmas, {fallen.compared} rollouts or tasks on each side)"
        )
        if sigmas >= WARN:
            signs.append((collapsed, sigmas, Sign("reward", what, since, collapsed)))
    return max(signs)[-1] if signs else None


def drop(before: Sequence[Scored], after: Sequence[Scored]) -> Drop:
    """Compare rewards before and after: within each task that has both, and by the means of all other tasks.

    This is a stratified permutation test (Mantel 1963, J. Am. Stat. Assoc. 58:690): if the policy were the same, the
    order of a task's rewards would be chance. No variance is estimated from one side alone, so each side's rewards may
    be all equal. Both sides of a stratum are cut to the same size (the newest from before, an even spread from after).
    That makes the test symmetric, so that rare rewards raise no alarm.

    Rollouts of a group are alike, so the variance is at least that between groups: the cluster-robust variance (Liang &
    Zeger 1986, Biometrika 73:13), where a group is the rollouts of one task that began with one version. It is ignored
    if there are too few groups to tell.
    """
    first, second = list[float](), list[float]()
    of_alone = of_alike = between = 0.0
    groups: list[tuple[Any, Any]] = []  # of a task: the rewards' residuals, negative after, and the groups they are in
    for old, new in _strata(before, after):
        if not (size := min(len(old), len(new))):
            continue
        units = [*old[len(old) - size :], *(new[i * len(new) // size] for i in range(size))]
        rewards = np.array([one.reward for one in units])
        first += rewards[:size].tolist()
        second += rewards[size:].tolist()
        spread = size / 2 * float(rewards.var(ddof=1))
        if units[0].task_id is None:
            of_alone += spread
        else:
            of_alike += spread
            residuals = (rewards - rewards.mean()) * np.repeat((1, -1), size)
            groups.append((residuals, np.unique([one.version for one in units], return_inverse=True)[1]))
    if not first:
        return Drop()
    was, now = fmean(first), fmean(second)
    for residuals, places in groups:
        sums = np.bincount(places, residuals / 2 - (was - now) / 4)
        between += len(sums) / (len(sums) - 1) * float(sums @ sums)
    if (freedom := sum(max(places) for _, places in groups) - 1) > 0:
        of_alike = max(of_alike, between * (freedom + FEW) / freedom)
    sigmas = len(first) * (was - now) / 2 / math.sqrt(of_alone + of_alike) if of_alone + of_alike > 0 else 0.0
    lowest = min(*first, *second)
    return Drop(sigmas, was, now, len(first), (was - now) / (was - lowest) if was > lowest else 0.0)


def _strata(before: Sequence[Scored], after: Sequence[Scored]) -> list[Sequence[list[Scored]]]:
    """A stratum for each task on both sides (None counts as a task), and one for the means of the other tasks."""
    tasks: dict[str | None, tuple[list[Scored], list[Scored]]] = defaultdict(lambda: ([], []))
    for side, scored in enumerate((before, after)):
        for one in scored:
            tasks[one.task_id][side].append(one)
    means: list[list[Scored]] = [[], []]
    for sides in (sides for sides in tasks.values() if not all(sides)):
        rewards = [one.reward for side in sides for one in side]
        means[not sides[0]].append(Scored(0, None, fmean(rewards), 0.0, 0.0))
    return [*(sides for sides in tasks.values() if all(sides)), means]


# Steps ----------------------------------------------------------------------------------------------------------------


def step_signs(steps: Sequence[Measured], config: CollapseConfig) -> list[Sign]:
    """Return a sign for each metric out of bounds in the newest step. `steps`: newest first.

    The limits for clipping and KL grow with the rollouts' staleness. The one for KL grows with its square (the KL
    of a small change is quadratic in the change), to at most 5 nats a token: beyond that, little is left of a policy.
    """
    limits: tuple[tuple[CollapseSign, str, float | None, int, float], ...] = (
        ("clip_share", "the share of clipped tokens", config.max_clip_share, 1, MOST_CLIPPED),
        ("kl", "the KL divergence of the samplers from the policy", config.max_kl, 2, 5.0),
        ("kl_base", "the KL divergence from the base model", config.max_kl_base, 0, math.inf),
    )
    signs = []
    for name, words, limit, power, most in limits:
        streak: list[tuple[int, float, float]] = []  # version, value, and what is allowed
        for version, metrics in steps if limit is not None else ():
            grown = (limit or 0.0) * max(1.0, metrics.get("staleness_mean", 0.0)) ** power
            allowed = max(limit or 0.0, min(grown, most))
            if metrics.get(name, 0.0) <= allowed:
                break
            streak.append((version, metrics[name], allowed))
        if streak:
            (_, value, allowed), since = streak[0], streak[-1][0]
            in_a_row = f"{len(streak)} steps in a row" if len(streak) > 1 else "in the last step"
            what = f"{words} is {value:.3g}, over the limit of {allowed:.3g} ({in_a_row})"
            signs.append(Sign(name, what, since, config.action != "warn" and len(streak) >= STEPS))
    return signs


# The monitor ----------------------------------------------------------------------------------------------------------


class Monitor:
    """Monitors one training loop for collapse. What it finds is in the store, so a restart loses nothing."""

    def __init__(self, config: TrainerConfig, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._rules, self._store, self._clock, self._config = Rules.of(config), store, clock, config.collapse
        if config.importance_level == "sequence":  # sequences are clipped as a rule (arXiv 2507.18071)
            self._config = config.collapse.model_copy(update={"max_clip_share": None})
        self._looked_at: object = None
        self._logged: Collapse | None = None

    async def keep(self) -> set[int]:
        """Return the versions that a rollback may go to from the live one. Their files must stay.

        They are 1, 2-3, 4-7 and 8-15 versions back, chosen so that the files of each were kept at every step before.
        """
        if self._config.action == "off":
            return set()
        line = await self._versions((await self._store.versions.live()).version)
        return {next((version for version in line[n:] if version % n == 1 % n), 0) for n in SPLITS}

    async def of_step(self, base: int, metrics: Metrics) -> dict[str, Any]:
        """Return the metrics to add to a step that began with version `base`, before it is committed.

        `warnings` has a text for each sign that was seen. With the metric `collapse`, the step must not be published.
        """
        live = await self._store.versions.live()
        if self._config.action == "off" or metrics["skipped"] or live.version != base:
            return {}
        steps = [Measured(base, metrics), *await self._line(base)]
        return await self._report(step_signs(steps, self._config), live, [step.version for step in steps])

    async def look(self) -> Collapse | None:
        """Check the rewards if they may have changed. Return the collapse that stops publishing, or None.

        A collapse may be seen in rewards alone: if all are equal, there is no step with metrics that could show it.
        """
        live, last = await self._store.versions.live(), await self._store.steps.last()
        if self._config.action == "off" or last is None:
            return None
        found = Collapse.of(last, live)
        looked_at = await self._store.rewards.newest(), live.version, live.live_at, self._clock() // RELOOK_S
        if found is None and looked_at != self._looked_at:
            self._looked_at = looked_at
            line = await self._versions(live.version)
            sign, seen = reward_sign(await self._scored(line[-1]), line, self._config), last.metrics.get("warnings", {})
            if sign is not None and (sign.collapsed or sign.name not in seen):
                metrics = last.metrics | await self._report([sign], live, line)
                metrics["warnings"] = {**seen, sign.name: sign.what}
                await self._store.steps.update_metrics(last.step, metrics)
                found = Collapse.of(replace(last, metrics=metrics), live)
        if found not in (None, self._logged):
            if self._config.action == "rollback" and found.go_back_to < live.version:
                log.warning("going back to policy version %d: %s", found.go_back_to, found.what)
            else:
                log.error("publishing has stopped: %s", found.story)
        self._logged = found
        return found

    async def _report(self, signs: Sequence[Sign], live: PolicyVersion, line: Sequence[int]) -> dict[str, Any]:
        """Log these signs. Return them as metrics, with `collapse` if one of them stops publishing."""
        for sign in signs:
            log.warning("policy version %d may be collapsing: %s", live.version, sign.what)
        metrics: dict[str, Any] = {"warnings": {sign.name: sign.what for sign in signs}} if signs else {}
        if stops := next((sign for sign in signs if sign.collapsed), None):
            go_back_to = await self._last_before(stops.since, line)
            metrics["collapse"] = asdict(Collapse(stops.name, stops.what, time.time(), live.live_at, go_back_to))
        return metrics

    async def _last_before(self, version: int, line: Sequence[int]) -> int:
        """The newest version of the line before `version` that can be served, or else the oldest other one.

        The base model can always be served. It is chosen if it came directly before, or if no other can be served.
        """
        before = [v for v in line if v < version]
        if before == [0]:
            return 0
        for earlier in [*before, *reversed(line[1:])]:
            if earlier and (await self._store.versions.get(earlier)).path is not None:
                return earlier
        return 0

    async def _versions(self, version: int) -> list[int]:
        """A version and its ancestors, newest first."""
        return [version, *(step.version for step in await self._line(version))]

    async def _line(self, version: int) -> list[Measured]:
        """The steps that led to a version, newest first, back to a collapse or to a version made live by hand."""
        line: list[Measured] = []
        for step in await self._store.steps.newest(LINE):
            # It changed nothing, or its trainer was killed before it was published.
            without_effect = step.metrics.get("skipped") or (step.version is None and step.base == version)
            if "collapse" in step.metrics or not (without_effect or step.version == version):
                break
            if not without_effect:
                line.append(Measured(step.base, step.metrics))
                version = step.base
        return line

    async def _scored(self, since: int) -> list[Scored]:
        """The newest rollouts of version `since` and later that have trusted rewards.

        Judge scores do not count: only rollouts that are trained on have them, so versions would not be comparable.
        A rollout counts once it is older than most rollouts were at their end: failures may end sooner than successes.
        """
        await self._store.rewards.use(self._rules)
        found = await self._store.rewards.since(since, NEWEST)
        took = sorted(one.done - one.began for one in found) or [0.0]
        settled = self._clock() - took[int(SETTLED * len(took))]
        return [one for one in found if one.began <= settled]
