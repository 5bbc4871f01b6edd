"""Counts the edges between calls of the newest rollouts, for `GET /status`."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Any

from ...core.errors import NotFound
from ...core.records import Rollout
from ...proxy.api.beside import Beside, Fields
from .calls import graph_of

NEWEST = 20  # rollouts that have ended
LARGE = 1_000  # calls; larger rollouts are not read
KEPT = 200  # counts of rollouts that are kept


class ContextsBeside(Beside):
    """Reads each rollout once, after its end."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._known: OrderedDict[tuple[str, int], Counter[str]] = OrderedDict()

    async def of_status(self, key_id: str | None) -> Fields:
        """Count the edges of the newest rollouts that have ended, by kind, `new` contexts and rejected attempts."""
        found = Counter[str]()
        page, _ = await self.store.rollouts.page({} if key_id is None else {"key_id": key_id}, 2 * NEWEST)
        for rollout in [one for one in page if one.status != "running" and one.calls <= LARGE][:NEWEST]:
            with suppress(NotFound):  # deleted meanwhile
                found += await self._counts(rollout)
        return {"contexts": dict(found)}

    async def _counts(self, rollout: Rollout) -> Counter[str]:
        known = self._known.get(name := (rollout.rollout_id, rollout.calls))
        if known is None:
            calls = await self.store.calls.of(rollout.rollout_id, short=True)
            graph = await asyncio.to_thread(graph_of, calls)
            known = self._known[name] = graph.counts() if graph is not None else Counter()
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return known
