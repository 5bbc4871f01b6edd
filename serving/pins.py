"""Keeps each rollout on the policy version that it began with."""

from __future__ import annotations

import time
from collections import OrderedDict

from ..core.errors import NotFound
from ..store.store import Store

MOST = 20_000


class Pins:
    """Knows the version that each rollout began with, in any process. The newest rollouts are in memory."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._recent: OrderedDict[str, tuple[int, float]] = OrderedDict()  # the version, and when the rollout began

    async def of(self, rollout_id: str) -> int | None:
        """Return the rollout's version; None before its first call."""
        known = self._recent.get(rollout_id)
        if known is not None:
            return known[0]
        try:
            rollout = await self._store.rollouts.get(rollout_id)
        except NotFound:
            return None
        pin = rollout.policy_version
        if pin is not None:
            self._recent[rollout_id] = pin, rollout.created_at
            if len(self._recent) > MOST:
                self._recent.popitem(last=False)
        return pin

    async def in_use(self) -> set[int]:
        """Return every version that a rollout may still ask for (`policy.pin_timeout_s`)."""
        since = time.time() - self._timeout_s
        recent = {version for version, began in self._recent.values() if began > since}
        return recent | await self._store.versions.pinned(since)

    def forget(self, rollout_id: str) -> None:
        """Drop the version of a deleted rollout. A new rollout of the same name begins with the live version."""
        self._recent.pop(rollout_id, None)
