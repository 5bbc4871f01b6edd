"""Limits how many rollouts a run starts: `--ahead` and `--budget`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.errors import LightningError
from ...store.training import Collapse
from ..api_client import ApiClient

POLL_S = 0.25
PATIENCE_S = 30.0  # until `wait` prints its reason
PAGE = 1000

Json = Mapping[str, Any]


class Observer:
    """Sees each rollout of a run, and decides whether more may start. This base class allows all."""

    async def wait(self) -> bool:
        """Wait until one more group may be opened and return True, or return False if none may be opened any more."""
        return True

    def opened(self, rollout_ids: Sequence[str], sibling_of: str | None) -> None:
        """Note that these rollouts were opened, as siblings of an earlier rollout or as a new group."""

    def ended(self, rollout: Json) -> None:
        """Note that the rollout's program ended. Its reward may still be awaited."""


class PolicyCollapsed(LightningError):
    """Publishing has stopped, so no new version will be trained on further rollouts."""


class Backlog(Observer):
    """Keeps the number of opened rollouts that are not yet in the live weights within `limit`, by holding groups back.

    A group has `group_size` rollouts, and the limit is at least one group. A rollout stops counting when it has ended
    and nobody will reward it, when the trainer will not take it, or when the version of the step that took it is live.
    A rollout that the trainer dropped counts until the trainer's next step is live: a replacement opened earlier would
    be answered by the old weights.

    Behind a gate (`promotion.mode: gated`) a step counts as live once it is taken, and a running test holds nothing
    back, because new rollouts decide it.
    """

    def __init__(
        self, api: ApiClient, limit: int, group_size: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._api, self._limit, self._group_size, self._say = api, max(limit, group_size), group_size, say
        self._running: set[str] = set()
        self._ended: set[str] = set()  # and still counts

    def opened(self, rollout_ids: Sequence[str], sibling_of: str | None = None) -> None:
        self._running.update(rollout_ids)

    def ended(self, rollout: Json) -> None:
        self._running.discard(rollout["rollout_id"])
        self._ended.add(rollout["rollout_id"])

    async def wait(self) -> bool:
        """Wait for room for one more group, or for a running test. Raise PolicyCollapsed if publishing has stopped."""
        say_at = time.monotonic() + PATIENCE_S
        while not self._has_room() and not await self._forget_published() and not self._has_room():
            if not self._running and time.monotonic() > say_at:
                say_at = math.inf
                self._say(f"waiting for the trainer: {len(self._ended)} rollouts are not yet in the live weights")
            await asyncio.sleep(POLL_S)
        return True

    def _has_room(self) -> bool:
        return len(self._running) + len(self._ended) + self._group_size <= self._limit

    async def _forget_published(self) -> bool:
        """Return True if a running test needs new rollouts. Otherwise, stop counting those whose wait is over."""
        policy = await self._api.policy()
        if collapse := policy["collapse"]:
            raise PolicyCollapsed(f"publishing has stopped: {Collapse(**collapse).story}")
        if policy["test"] is not None:
            return True
        published = 0
        if (last := policy["last_step"]) is not None:
            # Behind a gate the newest step counts; so does one that changed no weights.
            counts = last["version"] is not None or last["metrics"].get("skipped") or policy.get("promotion") == "gated"
            published = last["step"] - (not counts)
        unseen = set(self._ended)
        async for rollout in self._api.every_rollout(min(PAGE, 2 * self._limit), mode="train"):
            if not unseen:
                return False
            if rollout["rollout_id"] in unseen:
                unseen.discard(rollout["rollout_id"])
                if not _is_waited_for(rollout, published):
                    self._ended.discard(rollout["rollout_id"])
        self._ended -= unseen  # deleted rollouts
        return False


def _is_waited_for(rollout: Json, published: int) -> bool:
    if rollout["dropped"]:
        return rollout["dropped_by"] is not None and rollout["dropped_by"] > published
    if rollout["step"] is not None:
        return rollout["step"] > published
    return rollout["status"] == "completed" and (rollout["reward"] is not None or rollout.get("awaits_reward", False))


class OverBudget(LightningError):
    """The budget stopped a run before its last task. Rollouts that had started were finished; the rest never began."""

    exit_code = 3


class Budget(Observer):
    """Limits the cost of a run's calls, and of the rewarders meanwhile, to `usd`. None means no limit.

    `earlier`: the cost so far of the run that is resumed. `left_out`: whether tasks were left out.
    """

    def __init__(self, api: ApiClient, usd: float | None) -> None:
        self._api, self._most = api, usd
        self.earlier, self.left_out = 0.0, False
        self._calls = self._rewarders = 0.0
        self._before: float | None = None
        self._unpriced = 0

    @property
    def spent(self) -> float:
        return self.earlier + self._calls + self._rewarders

    async def wait(self) -> bool:
        """Return False if the budget is spent or the cost of some calls is unknown, or else True."""
        await self.look()
        self.left_out = self._most is not None and (self.spent >= self._most or self._unpriced > 0)
        return not self.left_out

    async def look(self) -> None:
        """Read what rewarders have spent since the first look."""
        if self._most is None:
            return
        status = await self._api.request("GET", "/status")
        spent = float(sum(one["usd"] for one in status.get("spent", [])))
        self._before = spent if self._before is None else self._before
        self._rewarders = spent - self._before

    def ended(self, rollout: Json) -> None:
        if (costs := rollout.get("costs")) is not None:
            self._calls += costs["usd"]
            ended_well = (call["call_id"] for call in rollout["calls"] if call["status"] == "ok")
            self._unpriced += costs["unpriced"] + sum(costs["of_calls"][call_id]["unknown"] for call_id in ended_well)

    def require(self) -> None:
        if self.left_out and self._unpriced:
            raise OverBudget(
                f"--budget: {self._unpriced} calls have no known cost (see `costs --by model`); give their models "
                f"prices in `prices`. No more rollouts were started; {self.spent:.4g} USD are known to be spent"
            )
        if self.left_out:
            raise OverBudget(
                f"--budget: {self.spent:.4g} of {self._most:g} USD are spent. No more rollouts were started"
            )
