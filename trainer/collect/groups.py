"""The groups that wait for a step, kept in memory: each look reads only those that have changed since the last."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import Any

from ...core.config.trainer import TrainerConfig
from ...core.groups import Group, Grouping
from ...core.returns import Rules
from ...store.store import Store

Order = Callable[[Group], Any]  # a sort key: the first groups are taken first
STANDS_S = 300.0  # that complete rollouts wait without a step until it is told


class WaitingGroups:
    """Knows which groups are ready. Call `forget` for groups that are taken or dropped."""

    def __init__(self, config: TrainerConfig, store: Store, order: Order | None = None) -> None:
        self._config = config
        self._grouping = Grouping.of(config)
        self._store = store
        self._order = order or (lambda group: group.oldest)
        self._rules = Rules.of(config)
        self._cursor: int | None = None
        self._tasks: dict[str | None, Sequence[Group]] = {}
        self._ready: set[Group] = set()
        self._unready: set[Group] = set()
        self._due: list[tuple[float, int, Group]] = []  # a heap of those that wait for siblings, by their oldest
        self._numbers = count()

    async def next(self, *, fewer: bool, since: float | None) -> list[Group]:
        """Return the groups of the next step, in order; empty while there are too few (`Collector.next_batch`)."""
        await self._look()
        now, wanted = time.time(), self._config.tasks_per_step
        self._make_due_ready(now)
        ready = [group for group in [*self._ready, *await self._lone(now)] if since is None or group.oldest <= since]
        late = sum(self._places(group) == 0 for group in ready)
        found: list[Group] = []
        places = 0
        for group in heapq.nsmallest(wanted + late, ready, key=self._order):
            if places >= wanted:
                break
            found.append(group)
            places += self._places(group)
        enough = places >= wanted or (found and (fewer or self._has_waited(found[0], now)))
        return found if enough else []

    async def totals(self) -> tuple[int, float | None]:
        """Return how many complete rollouts wait for a step, and the Unix time at which the oldest began to wait."""
        await self._look()
        lone = await self._store.waiting.lone(self._grouping.failed) if self._config.takes_lone_rollouts else None
        found = [*self._ready, *self._unready, *([lone] if lone else [])]
        return sum(group.rewarded for group in found), min((group.oldest for group in found), default=None)

    def why_none(self) -> str | None:
        """Return what the next step lacks, once the rollouts that were there at the last look have waited for long."""
        found = [group for group in (*self._ready, *self._unready) if not group.late]
        if not found or time.time() - min(group.oldest for group in found) < STANDS_S:
            return None
        return what_is_missing(found, self._config)

    def is_complete(self, group: Group) -> bool:
        """Return whether nobody need wait for siblings: they are there, or were compared before."""
        return group.complete or (group.pool is None and group.ended >= self._config.group_size)

    def forget(self, groups: Iterable[Group]) -> None:
        """Forget these groups. Rollouts of theirs that are left are read again, as changed ones."""
        for group in groups:
            if group.pool is not None:
                self._ready.discard(group)
                self._unready.discard(group)

    async def _look(self) -> None:
        """Read the groups that have changed since the last look."""
        await self._store.rewards.use(self._rules)
        waiting = self._store.waiting
        cursor, tasks = await waiting.changed(self._cursor)
        if tasks is None or tasks:
            found = defaultdict[str | None, list[Group]](list)
            for group in await waiting.groups(grouping=self._grouping, tasks=tasks):
                found[group.task_id].append(group)
            for task in [*self._tasks] if tasks is None else tasks:
                self.forget(self._tasks.pop(task, ()))
            self._tasks |= found
            for group in chain.from_iterable(found.values()):
                if group.complete:
                    self._ready.add(group)
                else:
                    self._unready.add(group)
                    heapq.heappush(self._due, (group.oldest, next(self._numbers), group))
        self._cursor = cursor

    def _make_due_ready(self, now: float) -> None:
        """Make those ready that have waited long enough for their siblings."""
        while self._due and self._due[0][0] <= now - self._config.group_timeout_s:
            _, _, group = heapq.heappop(self._due)
            if group in self._unready:
                self._unready.discard(group)
                self._ready.add(group)

    async def _lone(self, now: float) -> list[Group]:
        """The rollouts without a task, as one group, if it is ready."""
        if not self._config.takes_lone_rollouts:
            return []
        lone = await self._store.waiting.lone(self._grouping.failed, self._config.rollouts_per_step)
        return [lone] if lone is not None and (self.is_complete(lone) or self._has_waited(lone, now)) else []

    def _has_waited(self, group: Group, now: float) -> bool:
        return now - group.oldest >= self._config.group_timeout_s

    def _places(self, group: Group) -> int:
        """1 for a group; rollouts without a task count as one for each `group_size` of them, late siblings as none."""
        if group.pool is None:
            return max(1, group.rewarded // self._config.group_size)
        return int(not group.late or group.ended >= self._config.group_size)


def full_groups(groups: Sequence[Group]) -> int:
    """Count the groups that a step can take, all siblings of which have ended."""
    return sum(not group.late and group.complete for group in groups)


def what_is_missing(groups: Sequence[Group], config: TrainerConfig) -> str:
    """Return how many groups are full, and how many a step still needs, as text."""
    wanted, full = config.tasks_per_step, full_groups(groups)
    begun = [group for group in groups if not group.late and not group.complete]
    line = f"{full} of the {wanted} groups that it takes are full (of {config.group_size} ended rollouts)"
    if full >= wanted:
        return f"{line}: it can be made"
    if not begun:
        return f"{line}; no other group has begun"
    lacking = sum(len(group.awaited) or config.group_size - group.ended for group in begun)
    short = f"{lacking} rollout{'s' * (lacking != 1)} short"
    return f"{line}; {len(begun)} more {'has' if len(begun) == 1 else 'have'} begun, {short}"
