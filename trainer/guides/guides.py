"""Asks each configured guide about a step's rows, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ...proxy.types import Rollout
from ..types import Batch, Guide


class Guides:
    """Several guides as one."""

    def __init__(self, guides: Sequence[Guide]) -> None:
        self._guides = guides

    async def teaches(self, rollout: Rollout) -> bool:
        """Return whether a guide can score a rollout from whose rewards nothing can be learned."""
        for guide in self._guides:
            if await guide.teaches(rollout):
                return True
        return False

    async def guided(self, batch: Batch) -> Batch:
        """Return the batch with the scores of all guides. Raise GuideError if one is away."""
        started = time.perf_counter()
        for guide in self._guides:
            batch = await guide.guided(batch)
        return replace(batch, metrics={**batch.metrics, "guide_s": time.perf_counter() - started})
