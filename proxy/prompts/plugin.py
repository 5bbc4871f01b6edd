"""Plugs prompts in: the proxy puts their texts in the place of agents' own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..plugins.hooks import Core, Hooks, ProxyPlugin, Work
from ..promotion.gate import Gate, rules
from ..promotion.splitting import PromptSplit
from ..store.resources.prompt_tests import NOT_GATED
from . import routes
from .prompts import PromptRewriter


class PromptsPlugin(ProxyPlugin):
    """Rewrites requests where there are prompts, and tests new versions (`prompts.promotion: gated`)."""

    routers = (routes.router,)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, store = self.config, core.store
        split: PromptSplit | None = None
        work: tuple[Work, ...] = ()
        if config.prompts.is_gated:
            split = PromptSplit(config, store)
            weighed = rules(config.prompts.gate, config.trainer)
            work = (Gate("prompt-gate", store.prompt_tests, store.database, weighed).run,)
        else:
            await store.prompt_tests.end(NOT_GATED)
        async with PromptRewriter(store.prompts, core.redactor, core.metrics.prompted, split) as prompts:
            yield Hooks(rewrite=prompts.put, work=work)


plugin = PromptsPlugin
