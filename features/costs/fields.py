"""The field that costs add to a rollout."""

from __future__ import annotations

from ...proxy.api.answers import RolloutDetail
from .routes import CostSeen


class RolloutCost(CostSeen):
    of_calls: dict[str, CostSeen]


class RolloutWithCosts(RolloutDetail):
    """`costs`: what its calls used and cost, together and each by its id."""

    costs: RolloutCost
