"""Plugs in where the context of each call comes from: fields of calls, and counts in the status."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Literal

from pydantic import BaseModel

from ...core.config.root import Config
from ...core.errors import NotFound
from ...core.records import Rollout
from ...proxy.api.status import Status
from ...proxy.api.views import Call
from ...proxy.hooks import Fields, ProxyPlugin
from ...store.store import Store
from .graph import graph_of

NEWEST = 20  # rollouts that have ended
LARGE = 1_000  # calls; larger rollouts are not read
KEPT = 200  # counts of rollouts that are kept


class Context(BaseModel):
    edge: Literal["continues", "edits", "compacts", "delegates", "returns", "retries"]
    call_id: str


class CallContexts(BaseModel):
    """`contexts`: where the call's context comes from. `rejected`: another attempt was used in place of its answer."""

    contexts: list[Context]
    rejected: bool


class StatusContexts(BaseModel):
    """`contexts`: edges by kind in the newest 20 rollouts that have ended, `new` contexts and `rejected` attempts."""

    contexts: dict[str, int]


class ContextsPlugin(ProxyPlugin):
    """Counts the edges between calls. It reads each rollout once, after its end."""

    fields = ((Call, CallContexts), (Status, StatusContexts))

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._known: OrderedDict[tuple[str, int], Counter[str]] = OrderedDict()

    async def status_fields(self, store: Store, key_id: str | None) -> Fields:
        """Count the edges of the newest rollouts that have ended, by kind, `new` contexts and rejected attempts."""
        found = Counter[str]()
        page, _ = await store.rollouts.page({} if key_id is None else {"key_id": key_id}, 2 * NEWEST)
        for rollout in [one for one in page if one.status != "running" and one.calls <= LARGE][:NEWEST]:
            with suppress(NotFound):  # deleted meanwhile
                found += await self._counts(store, rollout)
        return {"contexts": dict(found)}

    async def _counts(self, store: Store, rollout: Rollout) -> Counter[str]:
        known = self._known.get(name := (rollout.rollout_id, rollout.calls))
        if known is None:
            calls = await store.calls.of(rollout.rollout_id, short=True)
            graph = await asyncio.to_thread(graph_of, calls)
            known = self._known[name] = graph.counts() if graph is not None else Counter()
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return known


plugin = ContextsPlugin
