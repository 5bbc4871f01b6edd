"""Sums up what calls used and cost: by day, model, key, task, rollout or mode (`GET /costs`), and for each rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from ...core.config.root import Config
from ...core.json_text import loads_or_none
from ...core.prices import Prices, Used, used
from ...proxy.api.bodies import Finite, Limit
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.api.rollouts import RolloutDetail
from ...proxy.hooks import Fields, ProxyPlugin
from ...store.database import Database, Row
from ...store.store import Store

By = Literal["day", "model", "key", "task", "rollout", "mode"]
COLUMNS = {"model": "model", "mode": "mode"}  # of the others: KEY_id
CHUNK, MOST = 5_000, 200_000  # calls that one statement reads, and all of them
# What a call used, and, where no usage came, how many tokens were recorded.
_USED = """
calls.call_id, calls.model, calls.policy_version, calls.status, calls.http_status, calls.finish_reason, calls.usage,
calls.prompt_shared + COALESCE(LENGTH(calls.prompt_ids), 0) / 4 AS read,
COALESCE(LENGTH(calls.token_ids), 0) / 4 AS sampled
"""
COSTS_OF_ROLLOUT = f"SELECT {_USED} FROM calls WHERE calls.rollout_id = :rollout_id ORDER BY calls.seq"
_USED_BY = f"{_USED}, calls.started_at, rollouts.rollout_id, rollouts.task_id, rollouts.mode, rollouts.key_id"
# By order of insertion.
COSTS_OF_CALLS = f"""
SELECT {_USED_BY} FROM calls CROSS JOIN rollouts ON rollouts.rollout_id = calls.rollout_id
WHERE calls.rowid >= :place AND calls.rowid < :before AND calls.started_at >= :since
"""
PLACE_BEFORE = """
SELECT MIN(rowid) AS place, MAX(started_at) AS newest, COUNT(*) AS calls
FROM (SELECT rowid, started_at FROM calls WHERE rowid < :before ORDER BY rowid DESC LIMIT :chunk) AS recent
"""
# Of one key, by the order in which its rollouts were opened: each of them may still make calls.
COSTS_OF_KEY = f"""
SELECT {_USED_BY} FROM rollouts CROSS JOIN calls ON calls.rollout_id = rollouts.rollout_id
WHERE rollouts.key_id = :key_id AND rollouts.n >= :place AND rollouts.n < :before AND calls.started_at >= :since
"""
PLACE_OF_KEY = """
SELECT MIN(n) AS place, NULL AS newest, CAST(SUM(calls) AS BIGINT) AS calls FROM (
    SELECT n, calls FROM rollouts WHERE key_id = :key_id AND n < :before ORDER BY n DESC LIMIT :chunk / 20
) AS recent
"""
ALL = 2**62


Cost = dict[str, Any]  # the numbers of CostSeen


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


def summed(costs: Iterable[Cost]) -> Cost:
    """Return the sum of calls, or of sums."""
    total: Cost = dict.fromkeys(CostSeen.model_fields, 0)
    for cost in costs:
        for name, value in cost.items():
            total[name] += value
    return total


def of_call(row: Row, prices: Prices, alias: str) -> Cost:
    """Return what a call used and cost. The policy's are free unless `prices` has its alias.

    The first event of Anthropic's streams has a usage, too: that of one which was cut ends there.
    """
    tokens, status = used(loads_or_none(row["usage"])), row["status"]
    if tokens is None:
        is_known = status not in ("ok", "cancelled") and (status != "error" or row["http_status"] != 200)  # not billed
    else:
        is_known = row["finish_reason"] is not None or status not in ("cancelled", "error")
    if tokens is None and (row["read"] or row["sampled"]):
        tokens, is_known = Used(input=row["read"], output=row["sampled"]), True
    is_policys = row["policy_version"] is not None
    price = prices.configured(alias) if is_policys else prices.of(row["model"])
    is_free = is_policys and price is None
    usd = price.of(tokens) if price is not None and tokens is not None else 0.0
    is_unpriced = price is None and tokens is not None and not is_free
    tokens = tokens or Used()
    return {
        "calls": 1, "unknown": int(not is_known and not is_free), "unpriced": int(is_unpriced), "usd": usd,
        "input_tokens": tokens.input, "cached_tokens": tokens.cached, "output_tokens": tokens.output,
        "reasoning_tokens": tokens.reasoning,
    }  # fmt: skip


class CostTable:
    """Reads costs, off the way of a call."""

    def __init__(self, database: Database, config: Config) -> None:
        self._db = database
        self._prices, self._alias = Prices(config.prices), config.policy.alias

    async def of_rollout(self, rollout_id: str) -> Cost:
        """Return the cost of a rollout, and `of_calls`: that of each of its calls by its id."""
        rows = await self._db.all(COSTS_OF_ROLLOUT, {"rollout_id": rollout_id})
        calls = await asyncio.to_thread(
            lambda: {row["call_id"]: of_call(row, self._prices, self._alias) for row in rows}
        )
        return summed(calls.values()) | {"of_calls": calls}

    async def newest(self, by: By, since: float, key_id: str | None) -> dict[str, Any]:
        """Return the costs of the newest calls that began after `since`; with `key_id`, of its rollouts alone.

        `parts` has them by name, `since` when the oldest of them began; `complete`: there are no others.
        """
        parts, oldest, before, looked_at = dict[str | None, Cost](), list[float](), ALL, 0
        places, calls = (PLACE_BEFORE, COSTS_OF_CALLS) if key_id is None else (PLACE_OF_KEY, COSTS_OF_KEY)
        names: dict[str, str] = {}
        if by == "key":  # revoked keys may have had one name
            names = {row["key_id"]: row["name"] for row in await self._db.all("SELECT key_id, name FROM keys")}
        while looked_at < MOST:
            wanted = {"before": before, "chunk": CHUNK, "since": since, "key_id": key_id}
            edge = await self._db.one(places, wanted)
            if edge is None or edge["place"] is None:
                break
            rows = await self._db.all(calls, wanted | {"place": edge["place"]})
            await asyncio.to_thread(self._add, parts, rows, by, names)
            oldest += [min(row["started_at"] for row in rows)] if rows else []
            # calls that were imported may have begun long before those around them
            if edge["newest"] is not None and edge["newest"] < since:
                break
            before, looked_at = edge["place"], looked_at + edge["calls"]
        total = summed(parts.values())
        return {"parts": parts, "total": total, "since": min(oldest, default=None), "complete": looked_at < MOST}

    def _add(self, parts: dict[str | None, Cost], rows: Sequence[Row], by: By, names: Mapping[str, str]) -> None:
        for row in rows:
            if by == "day":
                name = time.strftime("%Y-%m-%d", time.gmtime(row["started_at"]))
            elif by == "model" and row["policy_version"] is not None:
                name = self._alias  # a version is served by a name of its own
            else:
                name = row[COLUMNS.get(by, f"{by}_id")]
            name = names.get(name, name)
            known = [parts[name]] if name in parts else []
            parts[name] = summed([*known, of_call(row, self._prices, self._alias)])


router = APIRouter(tags=["costs"], route_class=UserRoute)


class NamedCost(CostSeen):
    name: str | None


class CostPage(BaseModel):
    """`complete` is false if there are older calls than the newest 200,000 that the key sees, which are looked at."""

    by: By
    data: list[NamedCost]
    total: CostSeen
    since: float | None
    complete: bool


@router.get("/costs", response_model=CostPage)
async def get_costs(request: ControlRequest, by: By = "day", since: Finite = 0.0, limit: Limit = 100) -> dict[str, Any]:
    """What calls used and cost, by UTC day (newest first), model, key, task, rollout or mode (dearest first).

    `since` is Unix time. A key that sees only its own rollouts gets the costs of these.
    """
    p = request.parts
    costs = await CostTable(p.store.database, p.config).newest(by, since, request.caller.sees)
    data = [{"name": name} | cost for name, cost in costs.pop("parts").items()]
    data.sort(
        key=lambda part: (part["name"] or "") if by == "day" else (part["usd"], part["input_tokens"]), reverse=True
    )
    return {"by": by, "data": data[:limit], **costs}


class RolloutCost(CostSeen):
    of_calls: dict[str, CostSeen]


class RolloutCosts(BaseModel):
    """`costs`: what its calls used and cost, together and each by its id."""

    costs: RolloutCost


class CostsPlugin(ProxyPlugin):
    """Says what calls used and cost."""

    routers = (router,)
    fields = ((RolloutDetail, RolloutCosts),)

    async def rollout_fields(self, store: Store, rollout_id: str) -> Fields:
        return {"costs": await CostTable(store.database, self.config).of_rollout(rollout_id)}


plugin = CostsPlugin
