"""Chooses the best version: by evaluations, or without any by the smoothed rewards of training steps."""

from __future__ import annotations

from collections.abc import Sequence

from ...proxy.evaluation.evaluations import Best, Evaluations
from ...proxy.store.store import Store
from ...proxy.store.training import Step
from ..types import BesideSteps

NEWEST = 32  # steps whose rewards are smoothed; a version that was the best before them keeps what it had
SAME = 1e-6
REACH = 2  # steps to each side of one that count with it


class BestVersion(BesideSteps):
    """Keeps the files of the best version, and of those that are too new to be compared with it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.evaluations = Evaluations(store.database)

    async def keep(self) -> set[int]:
        best, newest = await self.choose(), await self._store.steps.newest(REACH, brief=True)
        return {step.base for step in newest} | (set() if best is None else {best.version})

    async def choose(self) -> Best | None:
        """Choose the best version anew, and return it; None as long as too few steps were taken."""
        return await self.evaluations.choose(smoothed(await self._store.steps.newest(NEWEST, brief=True)))


def smoothed(steps: Sequence[Step]) -> dict[int, float]:
    """Return, by the version that steps began with, the mean reward of their rollouts and of the steps beside them.

    The newest steps are still to come beside two of them. Rewards of 0, 1, 0, 0 in four steps of versions 0 to 3, with
    as many rollouts each: version 0 gets the mean of the first three, 1/3, and version 1 that of all, 1/4.

    Nothing if all steps have the same reward, as where siblings are only ranked: it tells no version from another.
    """
    counted = [step for step in sorted(steps, key=lambda one: one.step) if step.metrics.get("rollouts")]
    counted = [step for step in counted if "reward_mean" in step.metrics and "method" not in step.metrics]
    means = [step.metrics["reward_mean"] for step in counted]
    if max(means, default=0.0) - min(means, default=0.0) < SAME:
        return {}
    found = {}
    for place, step in enumerate(counted[:-REACH]):
        near = [one.metrics for one in counted[max(0, place - REACH) : place + REACH + 1]]
        rollouts = sum(metrics["rollouts"] for metrics in near)
        found[step.base] = sum(metrics["reward_mean"] * metrics["rollouts"] for metrics in near) / rollouts
    return found
