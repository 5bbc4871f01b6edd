"""Plugs prompts in: the proxy puts their texts in the place of agents' own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...proxy.plugins.hooks import Core, Hooks, ProxyPlugin
from . import routes
from .beside import PromptsBeside
from .prompts import PromptRewriter
from .table import PromptTable


class PromptsPlugin(ProxyPlugin):
    """Rewrites requests where there are prompts."""

    routers = (routes.router,)
    beside = PromptsBeside

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        counter = core.metrics.counter("prompts", "Calls that a prompt was put into, and that fitted none", "outcome")
        count = lambda outcome: counter.labels(outcome).inc()  # noqa: E731
        async with PromptRewriter(PromptTable(core.store.database), core.redactor, count) as prompts:
            yield Hooks(rewrite=prompts.put)


plugin = PromptsPlugin
