"""Shows with a rollout what its calls used and cost."""

from __future__ import annotations

from functools import cached_property

from ...proxy.api.beside import Beside, Fields
from .table import CostTable


class CostsBeside(Beside):
    """The costs, in `GET /rollouts/{id}`."""

    @cached_property
    def table(self) -> CostTable:
        return CostTable(self.store.database, self.config)

    async def of_rollout(self, rollout_id: str) -> Fields:
        total, calls = await self.table.of_rollout(rollout_id)
        return {"costs": total.view() | {"of_calls": {name: cost.view() for name, cost in calls.items()}}}
