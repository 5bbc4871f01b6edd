"""Watches a training run for collapse. The store remembers that publication is stopped, and why."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...core.config.trainer import TrainerConfig
from ...core.records import PolicyVersion
from ...core.returns import Rules, earned
from ...store.store import Store
from ...store.training import Collapse, Step
from ...store.trust import Counted
from .signs import MOST, MOST_SIGMAS, Measured, ScoredRollout, Sign, kept, reward_sign, step_signs

log = logging.getLogger(__name__)

LINE = 32  # the number of steps to look back
FIRST = 3  # the number of steps that entropy and reward at the beginning are taken from
NEWEST = 1024  # the number of rollouts to look at
SETTLED = 0.9  # the share of rollouts that were rewarded within the time to wait for


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
        return await self._tell(sign, live, last, await self._stopped([sign], live, line))

    async def _tell(self, sign: Sign, live: PolicyVersion, last: Step, stopped: dict[str, Any]) -> Collapse | None:
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
        found = await self._store.trust.since(since, NEWEST)
        took = sorted(map(_took, found)) or [0.0]
        wait = took[int(SETTLED * len(took))]
        settled, unsettled = self._clock() - wait, math.inf
        scored = []
        for one in found:
            rollout = one.rollout
            if rollout.created_at > settled:
                unsettled = rollout.created_at + wait
            elif rollout.policy_version is not None and (reward := self._reward(one)) is not None:
                scored.append(ScoredRollout(rollout.policy_version, rollout.task_id, reward))
        self._look_again = unsettled
        return scored

    def _reward(self, one: Counted) -> float | None:
        found = earned(one.rewards, Rules.of(self._config), one.status)
        return found.own if one.status == "failed" else found.returned


def _took(one: Counted) -> float:
    """The seconds until a rollout had ended and was rewarded."""
    began, ends = one.rollout.created_at, [one.rollout.ended_at, *(reward.created_at for reward in one.rewards)]
    return max((at for at in ends if at is not None), default=began) - began


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
