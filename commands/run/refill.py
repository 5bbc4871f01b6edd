"""`--refill`: opens further groups in place of those whose rewards were all equal."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from .tasks import Task


@dataclass(slots=True)
class _Group:
    """A group under way. `all_known`: the rewards of all programs so far that did not fail are known."""

    task: Task
    running: int
    rewards: list[float] = field(default_factory=list)
    all_known: bool = True

    @property
    def taught(self) -> bool | None:
        """Whether the rewards differ; None if that is not known."""
        if not self.all_known or len(self.rewards) < 2:
            return None
        return not math.isclose(max(self.rewards), min(self.rewards), rel_tol=1e-9, abs_tol=1e-9)


class Refill:
    """Names the tasks of further groups, one for each group whose rewards are all equal (DAPO, arXiv 2503.14476).

    There are at most `limit` further groups. Tasks whose rewards differed come first, the one that waited longest at
    the head; then all tasks in turn. A group with rewards that have not arrived, or of failed programs, asks for none.
    """

    def __init__(self, tasks: Sequence[Task], limit: int, opens: Callable[[], None] = lambda: None) -> None:
        """`opens` is called for each further group."""
        self._limit, self._opens = limit, opens
        self._all, self._taught = cycle(tasks), deque[Task]()
        self._groups: dict[str, _Group] = {}
        self._changed = asyncio.Event()
        self.missing = 0  # groups that taught nothing and were not replaced

    def opened(self, task: Task, rollout_ids: Sequence[str]) -> None:
        """Note that a group was opened."""
        self._groups.update(dict.fromkeys(rollout_ids, _Group(replace(task, siblings=()), len(rollout_ids))))

    def replaced(self, old: str, new: str) -> None:
        """Note that a rollout of a group has another in its place."""
        self._groups[new] = self._groups.pop(old)

    def ended(self, rollout_id: str, reward: float | None, *, failed: bool) -> None:
        """Note how a program ended."""
        group = self._groups.pop(rollout_id)
        group.running -= 1
        if reward is not None:
            group.rewards.append(reward)
        elif not failed:
            group.all_known = False
        if not group.running:
            self.missing += group.taught is False
            self._taught.extend([group.task] if group.taught else [])
        self._changed.set()

    async def next(self) -> Task | None:
        """Return the task of the next further group, once it is known to be needed; None if no more are."""
        while self._limit > 0:
            if self.missing:
                self.missing, self._limit = self.missing - 1, self._limit - 1
                self._opens()
                return self._taught.popleft() if self._taught else next(self._all)
            if not self._groups:
                return None
            self._changed.clear()
            await self._changed.wait()
        return None
