"""Decides when a training step may begin: at any time, in rounds, or while the machine is idle (`trainer.schedule`).

`rollouts`, `times` and `idle` are pure, in Unix time: they return what the trainer waits for, or None: train.
"""

from __future__ import annotations

import time
from datetime import datetime

import psutil

from ...core.config.trainer import ScheduleConfig
from ...store.store import Store
from .collector import Collector

AGO_S = 3600.0  # a call that has no end after this time is not under way: its proxy was killed


Waiting = tuple[int, float | None]  # so many complete rollouts, the first of them since this time


def rollouts(config: ScheduleConfig, waiting: Waiting, round: float | None) -> str | None:
    """Train in rounds: one begins when enough rollouts wait, and ends when all of these are trained on."""
    count, oldest = waiting
    if count >= config.every_rollouts or (oldest is not None and round is not None and oldest <= round):
        return None
    return f"{config.every_rollouts} complete rollouts, {count} so far"


def times(config: ScheduleConfig, waiting: Waiting, now: float) -> str | None:
    """Train in rounds: one begins at each time, and ends when all rollouts that waited then are trained on."""
    (count, oldest), round = waiting, config.last_time(now)
    if oldest is not None and round is not None and oldest <= round:
        return None
    return f"{datetime.fromtimestamp(config.next_time(now)):%a %H:%M}, {count} complete rollouts so far"


def idle(config: ScheduleConfig, quiet_s: float | None, load: float | None) -> str | None:
    """Train while no agent has called for a time, and other programs leave the processors alone.

    `quiet_s`: since the last call (None: nobody ever called). `load`: what others use (None: not known yet).
    """
    if quiet_s is not None and quiet_s < config.idle_s:
        return f"{config.idle_s:g} s without a call, {max(quiet_s, 0):.0f} so far"
    if load is None or load > config.max_load:
        found = "not measured yet" if load is None else f"now {load:.0%}"
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
            busy_at = await self._last_busy(now)
            return idle(config, None if busy_at is None else now - busy_at, self._load())
        waiting = await self._collector.waiting()
        in_time = config.when == "times"
        if waits := times(config, waiting, now) if in_time else rollouts(config, waiting, self.round):
            self.round = None
        elif in_time:
            self.round = config.last_time(now)
        elif waiting[0] >= config.every_rollouts:
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
