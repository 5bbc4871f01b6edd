"""Plugs training without a server in (`train --offline`)."""

from __future__ import annotations

import asyncio

from ..plugins.hooks import Run, TrainerPlugin


class OfflinePlugin(TrainerPlugin):
    """Trains on recorded rollouts."""

    def check(self, run: Run) -> None:
        if run.offline is None:
            from .data import check_store

            check_store(self.config)

    async def train(self, run: Run, stop: asyncio.Event) -> bool:
        if run.offline is None:
            return False
        from .offline import train_offline

        await train_offline(self.config, run, run.offline, stop)
        return True


plugin = OfflinePlugin
