"""`GET /costs`: what the newest calls used and cost."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ...proxy.api.answers import ERRORS, answers
from ...proxy.api.bodies import Finite
from ...proxy.api.requests import AgentRoute, Limit, caller_of, large_response, parts_for_all
from .table import By, CostTable

router = APIRouter(tags=["costs"], responses=ERRORS, route_class=AgentRoute)


class CostSeen(BaseModel):
    """`input_tokens` counts the `cached_tokens` too, `output_tokens` the `reasoning_tokens`.

    `usd` leaves out the `unpriced` calls, of models without a price, and what the `unknown` did not tell of.
    """

    calls: int
    unknown: int
    unpriced: int
    usd: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int


class NamedCost(CostSeen):
    name: str | None


class CostPage(BaseModel):
    """`complete` is false if there are older calls than the newest 200,000 that the key sees, which are looked at."""

    by: By
    data: list[NamedCost]
    total: CostSeen
    since: float | None
    complete: bool


@router.get("/costs", response_model=None, responses=answers(CostPage))
async def get_costs(request: Request, by: By = "day", since: Finite = 0.0, limit: Limit = 100) -> Response:
    """What calls used and cost, by UTC day (newest first), model, key, task, rollout or mode (dearest first).

    `since` is Unix time. A key that sees only its own rollouts gets the costs of these.
    """
    p = await parts_for_all(request)
    costs = await CostTable(p.store.database, p.config).newest(by, since, caller_of(request).sight.key_id)
    parts = sorted(costs.parts.items(), key=lambda part: (part[1].usd, part[1].used.input), reverse=True)
    if by == "day":
        parts.sort(key=lambda part: part[0] or "", reverse=True)
    data = [{"name": name} | cost.view() for name, cost in parts[:limit]]
    page = {"by": by, "data": data, "total": costs.total.view(), "since": costs.since, "complete": costs.complete}
    return await large_response(lambda: page)
