"""Keeps each rollout on the policy version that it began with."""

from __future__ import annotations

import time
from collections import OrderedDict

from ..errors import NotFound
from ..store.store import Store

MOST = 20_000


class Pins:
    """Knows the version that each rollout began with, in any process. The newest rollouts are in memory."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._recent: OrderedDict[str, int] = OrderedDict()

    async def of(self, rollout_id: str) -> int | None:
        """Return the rollout's version; None before its first call."""
        pin = self._recent.get(rollout_id)
        if pin is not None:
            return pin
        try:
            pin = (await self._store.rollouts.get(rollout_id)).policy_version
        except NotFound:
            return None
        if pin is not None:
            self._recent[rollout_id] = pin
            if len(self._recent) > MOST:
                self._recent.popitem(last=False)
        return pin

    async def in_use(self) -> set[int]:
        """Return every version that a rollout may still ask for (`policy.pin_timeout_s`)."""
        return set(self._recent.values()) | await self._store.versions.pinned(time.time() - self._timeout_s)

    def forget(self, rollout_id: str) -> None:
        """Drop the version of a deleted rollout. A new rollout of the same name begins with the live version."""
        self._recent.pop(rollout_id, None)
