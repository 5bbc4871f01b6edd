"""Keeps in memory the groups that wait for a step, and decides when a step may begin."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from ...core.config.trainer import ScheduleConfig, TrainerConfig
from ...core.groups import NO_END, Group, Grouping
from ...core.returns import Rules
from ...store.store import Store

Order = Callable[[Group], Any]  # a sort key: the first groups are taken first
STANDS_S = 300.0  # that complete rollouts wait without a step before a warning


class WaitingGroups:
    """Knows which groups are ready. Call `forget` for groups that are taken or dropped."""

    def __init__(self, config: TrainerConfig, store: Store, order: Order | None = None) -> None:
        self._config, self._store = config, store
        self._order = order or (lambda group: group.oldest)
        self._cursor: int | None = None
        self._tasks: dict[str | None, list[Group]] = {}

    async def next(self, *, fewer: bool, since: float | None) -> list[Group]:
        """Return the groups of the next step, in order, or an empty list while there are too few. See `next_batch`."""
        groups, now = await self._look(self._config.rollouts_per_step), time.time()
        ready = [group for group in groups if self._is_complete(group) or self._has_waited(group, now)]
        found: list[Group] = []
        places, wanted = 0, self._config.tasks_per_step
        for group in sorted((g for g in ready if since is None or g.oldest <= since), key=self._order):
            if places >= wanted:
                break
            found.append(group)
            places += self._places(group)
        enough = places >= wanted or (found and (fewer or self._has_waited(found[0], now)))
        return found if enough else []

    async def totals(self) -> tuple[int, float | None]:
        """Return how many rewarded rollouts wait for a step, and when (Unix time) the oldest began to wait, if any."""
        found = await self._look()
        return sum(group.rewarded for group in found), min((group.oldest for group in found), default=None)

    def why_none(self) -> str | None:
        """Return what the next step lacks; None unless a known rollout has waited for long."""
        found = [group for group in chain(*self._tasks.values()) if not group.late]
        if not found or time.time() - min(group.oldest for group in found) < STANDS_S:
            return None
        return what_is_missing(found, self._config)

    def forget(self, groups: Iterable[Group]) -> None:
        """Forget these groups. Their remaining rollouts count as changed, and are read again."""
        for group in groups:
            if group in (known := self._tasks.get(group.task_id, [])):
                known.remove(group)

    async def _look(self, limit: int = NO_END) -> list[Group]:
        """Return all groups, reading only those that changed. At most `limit` rollouts without a task form one.

        First, stored returns are brought up to date with the configured weights.
        """
        await self._store.rewards.use(Rules.of(self._config))
        waiting, grouping = self._store.waiting, Grouping.of(self._config)
        cursor, changed = await waiting.changed(self._cursor)
        if changed is None or changed:
            found = defaultdict[str | None, list[Group]](list)
            for group in await waiting.groups(grouping=grouping, tasks=changed):
                found[group.task_id].append(group)
            kept = {} if changed is None else {t: of for t, of in self._tasks.items() if t not in changed}
            self._tasks = kept | found
        self._cursor = cursor
        lone = await waiting.lone(grouping.failed, limit) if self._config.takes_lone_rollouts else None
        return [*chain(*self._tasks.values()), *([lone] if lone else [])]

    def _is_complete(self, group: Group) -> bool:
        """Whether the group awaits no more rollouts."""
        if group.pool is None:
            return self._config.compares_with_earlier or group.ended >= self._config.group_size
        return group.complete

    def _has_waited(self, group: Group, now: float) -> bool:
        return now - group.oldest >= self._config.group_timeout_s

    def _places(self, group: Group) -> int:
        """How many groups this one counts as: 1, or 0 if an earlier step took some of it and the rest is not full.

        Rollouts without a task are one group each if compared with earlier ones, else one per `group_size`, at least 1.
        """
        if group.pool is None:
            return (
                group.rewarded
                if self._config.compares_with_earlier
                else max(1, group.rewarded // self._config.group_size)
            )
        return int(not group.late or group.ended >= self._config.group_size)


class Schedule:
    """Decides when steps may begin: at any time, or in rounds. `round`: the Unix time at which the current one began.

    A round begins when enough rollouts wait, or at each configured time, and ends when none of the
    rollouts that waited at its beginning is left.
    """

    def __init__(self, config: ScheduleConfig, waiting: WaitingGroups) -> None:
        self._config, self._waiting = config, waiting
        self.round: float | None = None

    @property
    def in_rounds(self) -> bool:
        """Return whether training is in rounds. A round takes everything, so its last step may be small."""
        return self._config.when != "continuous"

    async def waits_for(self) -> str | None:
        """Return what the next step waits for; None if it may begin now."""
        if not self.in_rounds:
            return None
        config, now = self._config, time.time()
        count, oldest = await self._waiting.totals()
        if config.when == "times":
            self.round = config.last_time(now)
        elif count >= config.every_rollouts:
            self.round = now
        if oldest is not None and self.round is not None and oldest <= self.round:
            return None
        self.round = None
        if config.when == "times":
            return f"{datetime.fromtimestamp(config.next_time(now)):%a %H:%M}, {count} complete rollouts so far"
        return f"{config.every_rollouts} complete rollouts, {count} so far"


def full_groups(groups: Sequence[Group]) -> int:
    """Count the groups that await no more siblings and that no step has taken in part."""
    return sum(not group.late and group.complete for group in groups)


def what_is_missing(groups: Sequence[Group], config: TrainerConfig) -> str:
    """Say how many groups are full, how many others have begun, and how many rollouts these others lack."""
    wanted, full = config.tasks_per_step, full_groups(groups)
    begun = [group for group in groups if not group.late and not group.complete]
    line = f"{full} of the {wanted} groups for the next step are full ({config.group_size} ended rollouts each)"
    if full >= wanted:
        return f"{line}; the step can be taken"
    if not begun:
        return f"{line}; no other group has begun"
    lacking = sum(len(group.awaited) or config.group_size - group.ended for group in begun)
    short = f"{lacking} rollout{'s' * (lacking != 1)} short"
    return f"{line}; {len(begun)} more {'has' if len(begun) == 1 else 'have'} begun, {short}"
