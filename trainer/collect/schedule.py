"""Decides when a training step may begin: at any time, or in rounds (`trainer.schedule`)."""

from __future__ import annotations

import time
from datetime import datetime

from ...core.config.trainer import ScheduleConfig
from .collector import Collector


class Schedule:
    """`round` is when the current round began (Unix time), if there is one.

    A round begins when enough rollouts wait, or at each configured time, and ends when all rollouts that waited then
    are trained on.
    """

    def __init__(self, config: ScheduleConfig, collector: Collector) -> None:
        self._config, self._collector = config, collector
        self.round: float | None = None

    @property
    def in_rounds(self) -> bool:
        """Return whether training is in rounds. A round takes everything, so its last step may be small."""
        return self._config.when != "continuous"

    async def waits_for(self) -> str | None:
        """Return the reason why the next step must wait; None if it may begin now."""
        if not self.in_rounds:
            return None
        config, now = self._config, time.time()
        count, oldest = await self._collector.waiting()
        if config.when == "times":
            self.round = config.last_time(now)
        elif count >= config.every_rollouts:
            self.round = now
        if oldest is not None and self.round is not None and oldest <= self.round:
            return None
        self.round = None
        if config.when == "times":
            return f"{datetime.fromtimestamp(config.next_time(now)):%a %H:%M}, {count} complete rollouts so far"
        return f"{config.every_rollouts} complete rollouts, {count} so far"
