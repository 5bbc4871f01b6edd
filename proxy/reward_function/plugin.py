"""Plugs the reward function in: completed rollouts wait for its rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..plugins.hooks import Core, Hooks, ProxyPlugin
from .process import require_function
from .scoring import Scorer


class RewardFunctionPlugin(ProxyPlugin):
    """Asks `rewards.function` about completed rollouts."""

    async def check(self) -> None:
        await require_function(self.config.rewards)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        function = self.config.rewards.function
        await core.store.endings.use_function(function)
        if function is None:
            yield Hooks()
        else:
            yield Hooks(work=(Scorer(self.config, core.store, core.metrics.rewards.inc).run,))


plugin = RewardFunctionPlugin
