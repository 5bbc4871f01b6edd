"""Decides when a training step may begin: at any time, in rounds, or while the machine is idle (`trainer.schedule`).

`rollouts`, `times` and `idle` are pure: they return what the trainer waits for, or None: train.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

import psutil

from ...core.config.cron import last_time, next_time
from ...core.config.trainer import ScheduleConfig
from ...store.store import Store
from .collector import Collector

AGO_S = 3600.0  # a call that has no end after this time is not under way: its proxy was killed


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a schedule decides by. All times are Unix time.

    `waiting` complete rollouts have not been taken by a step, the first of them since `oldest`. The current round began
    at `round`. An agent's call was last seen under way at `busy_at` (None: never). Other programs use the share `load`
    of the processors (None: not known yet).
    """

    now: float
    waiting: int = 0
    oldest: float | None = None
    round: float | None = None
    busy_at: float | None = None
    load: float | None = None

    def waited_at(self, moment: float | None) -> bool:
        """Return whether a rollout has waited since `moment` or longer."""
        return moment is not None and self.oldest is not None and self.oldest <= moment


def rollouts(config: ScheduleConfig, facts: Facts) -> str | None:
    """Train in rounds: one begins when enough rollouts wait, and ends when all of these are trained on."""
    if facts.waiting >= config.every_rollouts or facts.waited_at(facts.round):
        return None
    return f"{config.every_rollouts} complete rollouts, {facts.waiting} so far"


def times(config: ScheduleConfig, facts: Facts) -> str | None:
    """Train in rounds: one begins at each time, and ends when all rollouts that waited then are trained on."""
    if facts.waited_at(last_time(config.at, facts.now)):
        return None
    following = datetime.fromtimestamp(next_time(config.at, facts.now))
    return f"{following:%a %H:%M}, {facts.waiting} complete rollouts so far"


def idle(config: ScheduleConfig, facts: Facts) -> str | None:
    """Train while no agent calls and other programs leave the processors alone. Checked before every step."""
    quiet = None if facts.busy_at is None else facts.now - facts.busy_at
    if quiet is not None and quiet < config.idle_s:
        return f"{config.idle_s:g} s without a call, {max(quiet, 0):.0f} so far"
    if facts.load is None or facts.load > config.max_load:
        found = "not measured yet" if facts.load is None else f"now {facts.load:.0%}"
        return f"other programs to use at most {config.max_load:.0%} of the processors, {found}"
    return None


class Schedule:
    """Decides by `trainer.schedule` when a step may begin. `round` is when the current round began, if there is one."""

    def __init__(self, config: ScheduleConfig, collector: Collector, store: Store) -> None:
        self._config, self._collector, self._store = config, collector, store
        self.round: float | None = None
        self._busy_at: float | None = None
        self._process = psutil.Process()
        self._is_measured = False

    @property
    def in_rounds(self) -> bool:
        """Return whether training is in rounds. A round takes everything, so its last step may be small."""
        return self._config.when in ("rollouts", "times")

    async def waits_for(self) -> str | None:
        """Return the reason why the next step must wait; None if it may begin now."""
        config, now = self._config, time.time()
        if config.when == "continuous":
            return None
        if config.when == "idle":
            return idle(config, Facts(now, busy_at=await self._last_busy(now), load=self._load()))
        facts = Facts(now, *await self._collector.waiting(), self.round)
        if waits := (times if config.when == "times" else rollouts)(config, facts):
            self.round = None
        elif config.when == "times":
            self.round = last_time(config.at, now)
        elif facts.waiting >= config.every_rollouts:
            self.round = now
        return waits

    async def _last_busy(self, now: float) -> float | None:
        """When a call was last under way. Earlier looks count too: the newest call need not be the last to end."""
        if await self._store.calls.under_way(now - AGO_S):
            self._busy_at = now
        newest = await self._store.calls.newest()
        return max((t for t in (self._busy_at, newest) if t is not None), default=None)

    def _load(self) -> float | None:
        """The share of the processors that other programs used since the last look; None at the first."""
        everybody, own = psutil.cpu_percent() / 100, self._process.cpu_percent() / 100 / (psutil.cpu_count() or 1)
        was_measured, self._is_measured = self._is_measured, True
        return min(max(everybody - own, 0.0), 1.0) if was_measured else None
