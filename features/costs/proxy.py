"""Plugs the costs in: a route that sums them up, and a field of rollouts."""

from __future__ import annotations

from pydantic import BaseModel

from ...proxy.api.answers import RolloutDetail
from ...proxy.hooks import Fields, ProxyPlugin
from ...store.store import Store
from . import routes
from .table import CostTable


class RolloutCost(routes.CostSeen):
    of_calls: dict[str, routes.CostSeen]


class RolloutCosts(BaseModel):
    """`costs`: what its calls used and cost, together and each by its id."""

    costs: RolloutCost


class CostsPlugin(ProxyPlugin):
    """Says what calls used and cost."""

    routers = (routes.router,)
    fields = ((RolloutDetail, RolloutCosts),)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        total, calls = await CostTable(store.database, self.config).of_rollout(rollout_id)
        return {"costs": total.view() | {"of_calls": {name: cost.view() for name, cost in calls.items()}}}


plugin = CostsPlugin
