"""Plugs prompts in: the proxy puts their texts in the place of agents' own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

from pydantic import BaseModel, Field

from ...proxy.api.answers import RolloutDetail
from ...proxy.api.bodies import Id, RolloutsBody
from ...proxy.api.views import record_view
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.store import Store
from . import routes
from .prompts import PromptRewriter
from .table import Placed, PromptTable


class OpenedWithPrompts(BaseModel):
    """`prompts`: versions of prompts by name, if not the live ones."""

    prompts: Annotated[
        dict[Id, routes.Version],
        Field(json_schema_extra={"additionalProperties": False}),  # beside the pattern of its names
    ] = {}


class RolloutPrompts(BaseModel):
    """`prompts`: what the model was shown in place of texts that the agent sent."""

    prompts: list[Placed]


class PromptsPlugin(ProxyPlugin):
    """Rewrites requests where there are prompts."""

    routers = (routes.router,)
    fields = ((RolloutsBody, OpenedWithPrompts), (RolloutDetail, RolloutPrompts))

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        counter = core.metrics.counter("prompts", "Calls that a prompt was put into, and that fitted none", "outcome")
        count = lambda outcome: counter.labels(outcome).inc()  # noqa: E731
        async with PromptRewriter(PromptTable(core.store.database), core.redactor, count) as prompts:
            yield Hooks(rewrite=prompts.put)

    async def check_rollouts(self, store: Store, added: OpenedWithPrompts) -> None:
        await PromptTable(store.database).check(added.prompts)

    async def rollouts_opened(self, store: Store, rollout_ids: Sequence[str], added: OpenedWithPrompts) -> None:
        await PromptTable(store.database).pin(rollout_ids, added.prompts)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        placed = await PromptTable(store.database).placed_in(rollout_id)
        return {"prompts": [*map(record_view, placed)]}


plugin = PromptsPlugin
