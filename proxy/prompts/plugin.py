"""Plugs prompts in: the proxy puts their texts in the place of agents' own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..gate.gate import Gate, rules
from ..plugins.hooks import Core, Hooks, ProxyPlugin, Work
from . import routes
from .beside import PromptsBeside
from .config import PromptKeys
from .prompt_tests import NOT_GATED, PromptTests
from .prompts import PromptRewriter
from .splitting import PromptSplit
from .table import PromptTable


class PromptsPlugin(ProxyPlugin):
    """Rewrites requests where there are prompts, and tests new versions (`prompts.promotion: gated`)."""

    routers = (routes.router,)
    beside = PromptsBeside

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, database = self.config, core.store.database
        tests = PromptTests(database)
        split: PromptSplit | None = None
        work: tuple[Work, ...] = ()
        section = PromptKeys.of(config).prompts
        if section.is_gated:
            split = PromptSplit(config, tests)
            weighed = rules(section.gate, config.trainer)
            work = (Gate("prompt-gate", tests, database, weighed).run,)
        else:
            await tests.end(NOT_GATED)
        counter = core.metrics.counter("prompts", "Calls that a prompt was put into, and that fitted none", "outcome")
        count = lambda outcome: counter.labels(outcome).inc()  # noqa: E731
        async with PromptRewriter(PromptTable(database), core.redactor, count, split) as prompts:
            yield Hooks(rewrite=prompts.put, work=work)


plugin = PromptsPlugin
