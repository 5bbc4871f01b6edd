"""Lets side rooms keep fields beside rollouts and policy versions, which the routes check, keep and show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.config.root import Config
from ...store.store import Store
from ..gateway.metrics import Metrics
from .bodies import RolloutsBody

Fields = Mapping[str, Any]


class Beside:
    """Fields of a side room beside rollouts and policy versions. A method that is not overridden does nothing."""

    def __init__(self, config: Config, store: Store) -> None:
        self.config = config
        self.store = store

    async def check(self, body: RolloutsBody) -> None:
        """Raise LightningError if rollouts cannot be opened as a request wants them."""

    async def opened(self, rollout_ids: Sequence[str], body: RolloutsBody) -> None:
        """Keep the fields of a request that has just opened rollouts."""

    async def of_rollout(self, rollout_id: str) -> Fields:
        """Return fields for `GET /rollouts/{rollout_id}`."""
        return {}

    async def of_status(self, key_id: str | None) -> Fields:
        """Return fields for `GET /status`, of the rollouts that were opened with this key; None: of all."""
        return {}

    async def of_policy(self) -> Fields:
        """Return fields for `GET /policy`."""
        return {}

    async def of_versions(self) -> Callable[[int], Fields]:
        """Return what has the fields of each version for `GET /policy/versions`. The versions are read after it."""
        return lambda _: {}

    async def measure(self, metrics: Metrics) -> None:
        """Set the room's gauges, before the metrics are shown."""
