"""Sums up what calls used and cost: by day, model, key, task, rollout or mode (`GET /costs`), and for each rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from ...core.config.root import Config
from ...core.prices import Prices, Used
from ...proxy.api.bodies import Finite, Limit
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.api.rollouts import RolloutDetail
from ...proxy.hooks import Fields, ProxyPlugin
from ...store.database import Database, Row
from ...store.store import Store

By = Literal["day", "model", "key", "task", "rollout", "mode"]
DAY_S = 86_400
PARTS = {
    "day": f"CAST(calls.started_at AS BIGINT) / {DAY_S}",  # PostgreSQL rounds: half a second at midnight
    "model": "calls.model",
    "key": "COALESCE(keys.name, rollouts.key_id)",  # revoked keys may have had one name
    "task": "rollouts.task_id",
    "rollout": "rollouts.rollout_id",
    "mode": "rollouts.mode",
}
# Refusals are not billed. Anthropic's streams report usage in their first event; if one is cut off, it is incomplete.
SUMS = """
calls.model, CASE WHEN calls.policy_version IS NULL THEN 0 ELSE 1 END AS is_policys, COUNT(*) AS calls,
SUM(CASE WHEN input_tokens IS NULL THEN
             CASE WHEN calls.status IN ('ok', 'cancelled') OR (calls.status = 'error' AND http_status = 200)
                  THEN 1 ELSE 0 END
         WHEN usage IS NOT NULL AND finish_reason IS NULL AND calls.status IN ('cancelled', 'error') THEN 1
         ELSE 0 END) AS unknown,
COUNT(input_tokens) AS counted, CAST(COALESCE(SUM(input_tokens), 0) AS BIGINT) AS input,
CAST(COALESCE(SUM(cached_tokens), 0) AS BIGINT) AS cached, CAST(COALESCE(SUM(kept_tokens), 0) AS BIGINT) AS kept,
CAST(COALESCE(SUM(output_tokens), 0) AS BIGINT) AS output,
CAST(COALESCE(SUM(reasoning_tokens), 0) AS BIGINT) AS reasoning
"""
COSTS_OF_ROLLOUT = f"""
SELECT calls.call_id AS part, {SUMS} FROM calls WHERE rollout_id = :rollout_id GROUP BY seq, 1, 2, 3
"""
COSTS_OF_CALLS = """
SELECT {part} AS part, {sums} FROM calls CROSS JOIN rollouts ON rollouts.rollout_id = calls.rollout_id
LEFT JOIN keys ON keys.key_id = rollouts.key_id
WHERE calls.started_at >= :since GROUP BY 1, 2, 3
"""
COSTS_OF_KEY = """
SELECT {part} AS part, {sums} FROM rollouts CROSS JOIN calls ON calls.rollout_id = rollouts.rollout_id
LEFT JOIN keys ON keys.key_id = rollouts.key_id
WHERE rollouts.key_id = :key_id AND calls.started_at >= :since GROUP BY 1, 2, 3
"""

Cost = dict[str, Any]  # the numbers of CostSeen


class CostSeen(BaseModel):
    """Tokens and costs. `input_tokens` includes `cached_tokens`, `output_tokens` includes `reasoning_tokens`.

    `usd` excludes `unpriced` calls (models without a price). `unknown`: calls that may be billed for unreported usage.
    """

    calls: int
    unknown: int
    unpriced: int
    usd: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int


def summed(costs: Iterable[Cost]) -> Cost:
    total: Cost = dict.fromkeys(CostSeen.model_fields, 0)
    for cost in costs:
        for name, value in cost.items():
            total[name] += value
    return total


class CostTable:
    """Sums up costs in the database on request; calls do not wait for this."""

    def __init__(self, database: Database, config: Config) -> None:
        self._db = database
        self._prices, self._alias = Prices(config.prices), config.policy.alias

    async def of_rollout(self, rollout_id: str) -> Cost:
        """Return the cost of a rollout, and in `of_calls` the cost of each call by id."""
        rows = await self._db.all(COSTS_OF_ROLLOUT, {"rollout_id": rollout_id})
        calls = {row["part"]: self._cost(row) for row in rows}
        return summed(calls.values()) | {"of_calls": calls}

    async def since(self, since: float, by: By, key_id: str | None) -> dict[str | None, Cost]:
        """Return costs by group for calls that began at `since` or later. With `key_id`, only its rollouts count."""
        statement = (COSTS_OF_CALLS if key_id is None else COSTS_OF_KEY).format(part=PARTS[by], sums=SUMS)
        rows = await self._db.all(statement, {"since": since, "key_id": key_id})
        return await asyncio.to_thread(self._by_name, rows, by)

    def _by_name(self, rows: Sequence[Row], by: By) -> dict[str | None, Cost]:
        parts: dict[str | None, list[Cost]] = {}
        for row in rows:
            name = row["part"]
            if by == "day":
                name = time.strftime("%Y-%m-%d", time.gmtime(name * DAY_S))
            elif by == "model" and row["is_policys"]:
                name = self._alias  # a version is served by a name of its own
            parts.setdefault(name, []).append(self._cost(row))
        return {name: summed(costs) for name, costs in parts.items()}

    def _cost(self, row: Row) -> Cost:
        """What calls of one model used and cost. Calls of the policy are free unless `prices` has its alias."""
        price = self._prices.configured(self._alias) if row["is_policys"] else self._prices.of(row["model"])
        is_free = price is None and row["is_policys"]
        tokens = Used(*(row[name] for name in Used._fields))
        return {
            "calls": row["calls"],
            "unknown": 0 if is_free else row["unknown"],
            "unpriced": row["counted"] if price is None and not is_free else 0,
            "usd": price.of(tokens) if price else 0.0,
            **{name: getattr(tokens, name.removesuffix("_tokens")) for name in TOKENS},
        }


TOKENS = [name for name in CostSeen.model_fields if name.endswith("_tokens")]
router = APIRouter(tags=["costs"], route_class=UserRoute)


class NamedCost(CostSeen):
    name: str | None


class CostPage(BaseModel):
    by: By
    data: list[NamedCost]
    total: CostSeen


@router.get("/costs", response_model=CostPage)
async def get_costs(request: ControlRequest, by: By = "day", since: Finite = 0.0, limit: Limit = 100) -> dict[str, Any]:
    """What calls used and cost, by UTC day (newest first), model, key, task, rollout or mode (costliest first).

    `since` is Unix time. A key that sees only its own rollouts gets their costs only.
    """
    p = request.parts
    parts = await CostTable(p.store.database, p.config).since(since, by, request.caller.sees)
    data = [{"name": name} | cost for name, cost in parts.items()]
    data.sort(
        key=lambda part: (part["name"] or "") if by == "day" else (part["usd"], part["input_tokens"]), reverse=True
    )
    return {"by": by, "data": data[:limit], "total": summed(parts.values())}


class RolloutCost(CostSeen):
    of_calls: dict[str, CostSeen]


class RolloutCosts(BaseModel):
    """`costs`: what the rollout's calls used and cost, in total and by call id."""

    costs: RolloutCost


class CostsPlugin(ProxyPlugin):
    routers = (router,)
    fields = ((RolloutDetail, RolloutCosts),)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        return {"costs": await CostTable(store.database, self.config).of_rollout(rollout_id)}


plugin = CostsPlugin
