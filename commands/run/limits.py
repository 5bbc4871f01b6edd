"""What limits the rollouts that a run begins: `--ahead` of the policy, and `--budget`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...core.errors import LightningError
from ...store.training import Collapse
from ..api_client import ApiClient

POLL_S = 0.25
PATIENCE_S = 30.0  # until `wait` prints its reason
PAGE = 1000

Json = Mapping[str, Any]


class PolicyCollapsed(LightningError):
    """Publication is stopped, so no version will ever be trained on the agents' new rollouts."""


class BacklogGate:
    """Decides when the next group may be opened, from groups opened and rollouts ended. This one is always open."""

    async def wait(self) -> None:
        """Return when there is room for one more group."""

    def opened(self, rollout_ids: Iterable[str]) -> None:
        """Note that a group was opened."""

    def ended(self, rollout_id: str) -> None:
        """Note that a rollout's program ended. Its reward has arrived, if there is one."""


class Backlog(BacklogGate):
    """Opens no group while `limit` of the opened rollouts are not yet in the live weights.

    A group has `group_size` rollouts, and the limit is at least one group. A rollout stops counting when it ended and
    nobody will reward it, when the trainer will not take it, or when the version of the step that took it is live.
    A rollout that the trainer dropped counts until the trainer's next step is live: a rollout opened earlier in its
    place would be answered by the old weights.

    Behind a gate (`promotion.mode: gated`) a step counts as live once it is taken, and a test that is under way holds
    nothing back: it is decided by new rollouts.
    """

    def __init__(
        self, api: ApiClient, limit: int, group_size: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._api, self._limit, self._group_size, self._say = api, max(limit, group_size), group_size, say
        self._running: set[str] = set()
        self._ended: set[str] = set()  # those that still count

    def opened(self, rollout_ids: Iterable[str]) -> None:
        self._running.update(rollout_ids)

    def ended(self, rollout_id: str) -> None:
        self._running.discard(rollout_id)
        self._ended.add(rollout_id)

    async def wait(self) -> None:
        """Return when there is room for one more group; PolicyCollapsed if there will be none."""
        started, is_reported = time.monotonic(), False
        while not self._has_room():
            if await self._forget_published() or self._has_room():
                return
            if not is_reported and not self._running and time.monotonic() - started > PATIENCE_S:
                is_reported = True
                self._say(f"waiting for the trainer: {len(self._ended)} rollouts are not yet in the live weights")
            await asyncio.sleep(POLL_S)

    def _has_room(self) -> bool:
        return len(self._running) + len(self._ended) + self._group_size <= self._limit

    async def _forget_published(self) -> bool:
        """Count no rollout whose step is live. Return whether new ones are needed in any case."""
        policy = await self._api.policy()
        if collapse := policy["collapse"]:
            raise PolicyCollapsed(f"no version is published any more: {Collapse(**collapse).story}")
        if policy["test"] is not None:
            return True
        published = _published(policy["last_step"], is_gated=policy.get("promotion") == "gated")
        left = set(self._ended)
        async for rollout in self._api.every_rollout(min(PAGE, 2 * self._limit), mode="train"):
            if rollout["rollout_id"] in left:
                left.discard(rollout["rollout_id"])
                if not _is_waited_for(rollout, published):
                    self._ended.discard(rollout["rollout_id"])
            if not left:
                return False
        self._ended -= left  # deleted rollouts
        return False


def _published(last: Mapping[str, Any] | None, *, is_gated: bool) -> int:
    """The newest step whose weights are live, or that changed no weights; behind a gate, the newest of all."""
    if last is None:
        return 0
    is_live = is_gated or last["version"] is not None or last["metrics"].get("skipped")
    return last["step"] if is_live else last["step"] - 1


def _is_waited_for(rollout: Mapping[str, Any], published: int) -> bool:
    if rollout["dropped"]:
        return rollout["dropped_by"] is not None and rollout["dropped_by"] > published
    if rollout["step"] is not None:
        return rollout["step"] > published
    return rollout["status"] == "completed" and (rollout["reward"] is not None or rollout.get("awaits_reward", False))


class OverBudget(LightningError):
    """A run stopped before its last task: what was begun has ended, and nothing further began."""

    exit_code = 3


class Budget:
    """USD that a run may cost: the calls of its rollouts, and what rewarders spend meanwhile. None: any amount."""

    def __init__(self, usd: float | None) -> None:
        self._most = usd
        self._calls, self._rewarders, self._before = 0.0, 0.0, 0.0
        self._unpriced = 0
        self.left_out = False  # tasks

    @property
    def spent(self) -> float:
        """Return the USD spent so far."""
        return self._calls + self._rewarders

    @property
    def is_spent(self) -> bool:
        """Return whether nothing further may begin: also where the cost of calls that ended well is not known."""
        return self._most is not None and (self.spent >= self._most or self._unpriced > 0)

    async def begin(self, api: ApiClient, earlier: float = 0.0) -> None:
        """Note what rewarders have spent before this run. `earlier`: what the run that is resumed has cost."""
        if self._most is not None:
            self._calls, self._before = earlier, await _of_rewarders(api)

    async def count(self, api: ApiClient, rollout: Json) -> None:
        """Count a rollout that has ended."""
        costs = rollout.get("costs")
        if self._most is None or costs is None:
            return
        self._calls += costs["usd"]
        ended_well = (call["call_id"] for call in rollout["calls"] if call["status"] == "ok")
        self._unpriced += costs["unpriced"] + sum(costs["of_calls"][call_id]["unknown"] for call_id in ended_well)
        self._rewarders = await _of_rewarders(api) - self._before

    def summary(self) -> dict[str, float]:
        """Return what to add to the summary of a run, as JSON."""
        return {} if self._most is None else {"usd": self.spent}

    def line(self) -> str | None:
        """Return what was spent, for a person; None without a budget."""
        return None if self._most is None else f"{self.spent:.4g} of {self._most:g} USD spent"

    def require(self) -> None:
        """Raise OverBudget if tasks were left out."""
        if self.left_out and self._unpriced:
            raise OverBudget(
                f"--budget: {self._unpriced} calls have no known cost (`costs --by model` says which): give the "
                f"model a price in `prices`. No further rollouts were begun; {self.spent:.4g} USD are known to be spent"
            )
        if self.left_out:
            raise OverBudget(
                f"--budget: {self.spent:.4g} of {self._most:g} USD are spent. No further rollouts were begun"
            )


async def _of_rewarders(api: ApiClient) -> float:
    status = await api.request("GET", "/status")
    return float(sum(one["usd"] for one in status.get("spent", [])))
