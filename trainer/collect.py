"""From the store's ended rollouts to the batch of a step: which groups are ready, and what is dropped and why."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from lightning_proxy.proxy.config import TrainerConfig
from lightning_proxy.proxy.errors import NotFound
from lightning_proxy.proxy.ledger import Group, Ledger
from lightning_proxy.proxy.store import Store
from lightning_proxy.proxy.types import ModelCall, Rollout
from lightning_proxy.trainer.advantage import Baseline, group_baselines
from lightning_proxy.trainer.credit import RolloutRewards, credit_strategy
from lightning_proxy.trainer.samples import rollout_samples
from lightning_proxy.trainer.types import Batch, Sample


@dataclass(slots=True)
class _Take:
    """What a step takes from the store: samples to train on, rollouts to mark, counts to report."""

    samples: list[Sample] = field(default_factory=list)
    rollout_ids: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, rollouts: Iterable[Rollout]) -> None:
        self.dropped.setdefault(reason, []).extend(r.rollout_id for r in rollouts)

    def metrics(self) -> dict[str, float]:
        rewards = self.rewards or [0.0]
        return {
            "reward_mean": fmean(rewards),
            "reward_std": pstdev(rewards),
            "reward_max": max(rewards),
            "rollouts": float(len(self.rewards)),
            "samples": float(len(self.samples)),
            **{name: float(self.counts[name]) for name in COUNTS},
        }


COUNTS = ("groups", "groups_equal", "rollouts_stale", "calls_untrainable", "calls_ambiguous", "rows_too_long")


class Collector:
    """Finds groups that are ready and claims them for a step."""

    def __init__(self, config: TrainerConfig, store: Store, ledger: Ledger) -> None:
        self._config = config
        self._store = store
        self._ledger = ledger
        self._credit = credit_strategy(config.credit)

    async def next_batch(self, live: int, *, fewer: bool = False) -> Batch | None:
        """Claim the rollouts of the next step; None while there are too few. `live` is the live policy version.

        A step takes `tasks_per_step` groups; fewer once one of them has waited for `group_timeout_s`, or if `fewer`.
        """
        while groups := await self._next_groups(fewer):
            take = _Take()
            for group in groups:
                await self._take_group(take, await self._ledger.group_rollouts(group.task_id), live)
            for reason, rollout_ids in take.dropped.items():
                await self._ledger.drop(rollout_ids, reason)
            if take.rollout_ids:
                step = await self._ledger.claim(take.rollout_ids, live)
                return Batch(step, tuple(take.samples), tuple(take.rollout_ids), take.metrics(), len(take.rewards))
        return None

    async def _next_groups(self, fewer: bool) -> list[Group]:
        now = time.time()
        ready = [group for group in await self._ledger.groups() if self._is_ready(group, now)]
        enough = len(ready) >= self._config.tasks_per_step or (ready and (fewer or self._waited(ready[0], now)))
        return ready[: self._config.tasks_per_step] if enough else []

    async def samples_of(self, rollouts: Sequence[Rollout]) -> list[Sample]:
        """The rows of rollouts that were trained on before, without advantages."""
        found: list[Sample] = []
        for rollout in rollouts:
            try:
                calls = await self._store.calls(rollout.rollout_id)
            except NotFound:  # deleted meanwhile
                continue
            found += self._rows(calls, [0.0] * len(calls), rollout, _Take())
        return found

    def _is_ready(self, group: Group, now: float) -> bool:
        """All siblings have ended, or the first of them has waited long enough."""
        return group.ended >= self._config.group_size or self._waited(group, now)

    def _waited(self, group: Group, now: float) -> bool:
        return now - group.oldest >= self._config.group_timeout_s

    async def _take_group(self, take: _Take, siblings: Sequence[Rollout], live: int) -> None:
        take.counts["groups"] += 1
        completed = [r for r in siblings if r.status == "completed"]
        calls: dict[str, list[ModelCall]] = {}
        for rollout in completed:
            with suppress(NotFound):  # deleted meanwhile
                calls[rollout.rollout_id] = await self._store.calls(rollout.rollout_id)
        completed = [r for r in completed if r.rollout_id in calls]
        returns = {r.rollout_id: rollout_return(r, calls[r.rollout_id]) for r in completed}
        rewarded = [r for r in completed if returns[r.rollout_id] is not None]
        stale = [r for r in rewarded if live - _oldest_version(calls[r.rollout_id], live) > self._config.max_staleness]
        fresh = [r for r in rewarded if r not in stale]
        take.counts["rollouts_stale"] += len(stale)
        take.drop("stale: sampled by too old a policy version", stale)
        take.drop("failed or discarded", (r for r in siblings if r.status in ("failed", "discarded")))
        rewards = [value for r in fresh if (value := returns[r.rollout_id]) is not None]
        take.rewards += rewards
        baselines = group_baselines(self._config.baseline, rewards)
        if baselines is None:
            take.counts["groups_equal"] += len(fresh) > 1
            take.drop("all rewards of the group are equal" if len(fresh) > 1 else "no siblings", fresh)
            return
        for rollout, reward, baseline in zip(fresh, rewards, baselines, strict=True):
            self._take_rollout(take, rollout, reward, calls[rollout.rollout_id], baseline)

    def _take_rollout(
        self, take: _Take, rollout: Rollout, reward: float, calls: Sequence[ModelCall], baseline: Baseline
    ) -> None:
        rewards = RolloutRewards(reward, {c.call_id: c.reward for c in calls if c.reward is not None})
        advantages = [baseline.advantage(value) for value in self._credit(calls, rewards)]
        rows = self._rows(calls, advantages, rollout, take)
        if not rows:
            too_long = any(c.trainable for c in calls)
            take.drop("longer than trainer.max_sample_tokens" if too_long else "no trainable calls", [rollout])
            return
        take.samples += rows
        take.rollout_ids.append(rollout.rollout_id)

    def _rows(
        self, calls: Sequence[ModelCall], advantages: Sequence[float], rollout: Rollout, take: _Take
    ) -> list[Sample]:
        task_id = rollout.task_id or rollout.rollout_id
        made = rollout_samples(calls, advantages, task_id=task_id, max_tokens=self._config.max_sample_tokens)
        take.counts["calls_untrainable"] += made.untrainable_calls
        take.counts["calls_ambiguous"] += made.ambiguous_calls
        take.counts["rows_too_long"] += made.long_rows
        return list(made.samples)


def rollout_return(rollout: Rollout, calls: Sequence[ModelCall]) -> float | None:
    """The rollout's own reward, or else the sum of its calls'; None without any."""
    if rollout.reward is not None:
        return rollout.reward
    of_calls = [call.reward for call in calls if call.reward is not None]
    return math.fsum(of_calls) if of_calls else None


def _oldest_version(calls: Sequence[ModelCall], live: int) -> int:
    return min((c.policy_version for c in calls if c.trainable and c.policy_version is not None), default=live)
