"""Decides when a training step may begin: at any time, in rounds, or while the machine is idle (`trainer.schedule`).

Each policy is a pure function of what is known (`Facts`) and returns what the trainer waits for, or None: train.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

import psutil

from ...core.config.cron import last_time, next_time
from ...core.config.trainer import ScheduleConfig
from ...store.store import Store
from .collector import Collector

LOOK_S = 1.0  # the load is measured over at least this time
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


def continuous(config: ScheduleConfig, facts: Facts) -> str | None:
    return None


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


POLICIES: Mapping[str, Callable[[ScheduleConfig, Facts], str | None]] = MappingProxyType(
    {"continuous": continuous, "rollouts": rollouts, "times": times, "idle": idle}
)


class Schedule:
    """Decides by `trainer.schedule` when a step may begin, and remembers the current round."""

    def __init__(self, config: ScheduleConfig, collector: Collector, store: Store) -> None:
        self._config = config
        self._collector = collector
        self._store = store
        self._round: float | None = None
        self._busy_at: float | None = None
        self._load = OthersLoad()

    @property
    def in_rounds(self) -> bool:
        """Return whether training is in rounds. A round takes everything, so its last step may be small."""
        return self._config.when in ("rollouts", "times")

    @property
    def round(self) -> float | None:
        """Return when the current round began, or None if there is none. It takes what waited at that time."""
        return self._round

    async def waits_for(self) -> str | None:
        """Return the reason why the next step must wait; None if it may begin now."""
        facts = await self._facts()
        waits = POLICIES[self._config.when](self._config, facts)
        self._round = None if waits is not None else self._round_of(facts)
        return waits

    def _round_of(self, facts: Facts) -> float | None:
        if self._config.when == "times":
            return last_time(self._config.at, facts.now)
        return facts.now if facts.waiting >= self._config.every_rollouts else self._round

    async def _facts(self) -> Facts:
        now = time.time()
        if self._config.when == "idle":
            return Facts(now, busy_at=await self._last_busy(now), load=self._load.look())
        if self._config.when == "continuous":
            return Facts(now)
        waiting, oldest = await self._collector.waiting()
        return Facts(now, waiting, oldest, self._round)

    async def _last_busy(self, now: float) -> float | None:
        """When a call was last under way. Earlier looks count too: the newest call need not be the last to end."""
        if await self._store.calls.under_way(now - AGO_S):
            self._busy_at = now
        newest = await self._store.calls.newest()
        return max((t for t in (self._busy_at, newest) if t is not None), default=None)


class OthersLoad:
    """Measures the share of the processors (0 to 1) that other programs used since the last look."""

    def __init__(self) -> None:
        self._at, self._before = time.monotonic(), _processor_seconds()
        self._load: float | None = None

    def look(self) -> float | None:
        """Return the share of the processors that others used; None in the first `LOOK_S` seconds."""
        at = time.monotonic()
        if at - self._at >= LOOK_S:
            busy, own = now = _processor_seconds()
            used = (busy - self._before[0]) - (own - self._before[1])
            self._load = min(max(used / (at - self._at) / (psutil.cpu_count() or 1), 0.0), 1.0)
            self._at, self._before = at, now
        return self._load


def _processor_seconds() -> tuple[float, float]:
    """The processor time of all programs, and of this one."""
    everybody, own = psutil.cpu_times(), psutil.Process().cpu_times()
    waiting = everybody.idle + getattr(everybody, "iowait", 0.0)
    return sum(everybody) - getattr(everybody, "guest", 0.0) - waiting, own.user + own.system
