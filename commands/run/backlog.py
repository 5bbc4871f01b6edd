"""`--ahead`: limits how far agents may run ahead of the policy."""

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
