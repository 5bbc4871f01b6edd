"""Sums up what calls used and cost: by day, model, key, task, rollout or mode (`GET /costs`), and for each rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

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
WAYS: tuple[By, ...] = get_args(By)
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


@dataclass(slots=True)
class Cost:
    """Calls, their tokens and USD. `unknown`: those that did not tell all they used; `unpriced`: without a price."""

    calls: int = 0
    unknown: int = 0
    unpriced: int = 0
    usd: float = 0.0
    used: Used = field(default_factory=Used)

    def add(self, tokens: Used, usd: float | None, is_known: bool) -> None:
        """Count a call."""
        self.calls += 1
        self.unknown += not is_known
        self.used = self.used.plus(tokens)
        self.unpriced += usd is None
        self.usd += usd or 0.0

    def plus(self, other: Cost) -> None:
        """Count the calls of another sum."""
        self.calls, self.unknown = self.calls + other.calls, self.unknown + other.unknown
        self.unpriced, self.usd = self.unpriced + other.unpriced, self.usd + other.usd
        self.used = self.used.plus(other.used)

    def view(self) -> dict[str, Any]:
        """Return it as JSON."""
        view = asdict(self)
        del view["used"]
        return view | {f"{name}_tokens": count for name, count in self.used._asdict().items() if name != "kept"}


@dataclass(slots=True)
class Costs:
    """The costs of the newest calls. `since`: the oldest of them began then; `complete`: there are no others."""

    parts: dict[str | None, Cost]
    total: Cost
    since: float | None = None
    complete: bool = True


def of_call(row: Row, prices: Prices, alias: str) -> tuple[Used, float | None, bool]:
    """Return what a call used and cost, and whether it told all. The policy's are free unless `prices` has its alias.

    The first event of Anthropic's streams has a usage, too: that of one which was cut ends there.
    """
    tokens = used(loads_or_none(row["usage"]))
    was_cut = tokens is not None and row["finish_reason"] is None and row["status"] in ("cancelled", "error")
    if tokens is None and (row["read"] or row["sampled"]):
        tokens = Used(input=row["read"], output=row["sampled"])
    is_policys = row["policy_version"] is not None
    price = prices.configured(alias) if is_policys else prices.of(row["model"])
    if is_policys and price is None:
        return tokens or Used(), 0.0, True
    if tokens is None:
        is_billed = row["status"] in ("ok", "cancelled") or (row["status"] == "error" and row["http_status"] == 200)
        return Used(), 0.0, not is_billed
    return tokens, None if price is None else price.of(tokens), not was_cut


class CostTable:
    """Reads costs, off the way of a call."""

    def __init__(self, database: Database, config: Config) -> None:
        self._db = database
        self._prices = Prices(config.prices)
        self._alias = config.policy.alias

    async def of_rollout(self, rollout_id: str) -> tuple[Cost, dict[str, Cost]]:
        """Return the cost of a rollout, and of each of its calls by its id."""
        rows = await self._db.all(COSTS_OF_ROLLOUT, {"rollout_id": rollout_id})
        return await asyncio.to_thread(self._by_call, rows)

    def _by_call(self, rows: Sequence[Row]) -> tuple[Cost, dict[str, Cost]]:
        total, calls = Cost(), dict[str, Cost]()
        for row in rows:
            found = of_call(row, self._prices, self._alias)
            calls[row["call_id"]] = one = Cost()
            one.add(*found)
            total.add(*found)
        return total, calls

    async def newest(self, by: By, since: float, key_id: str | None) -> Costs:
        """Return the costs of the newest calls that began after `since`; with `key_id`, of its rollouts alone."""
        costs, before, looked_at = Costs({}, Cost()), ALL, 0
        places, calls = (PLACE_BEFORE, COSTS_OF_CALLS) if key_id is None else (PLACE_OF_KEY, COSTS_OF_KEY)
        while looked_at < MOST:
            wanted = {"before": before, "chunk": CHUNK, "since": since, "key_id": key_id}
            edge = await self._db.one(places, wanted)
            if edge is None or edge["place"] is None:
                break
            rows = await self._db.all(calls, wanted | {"place": edge["place"]})
            await asyncio.to_thread(self._add, costs, rows, by)
            # calls that were imported may have begun long before those around them
            if edge["newest"] is not None and edge["newest"] < since:
                break
            before, looked_at = edge["place"], looked_at + edge["calls"]
        else:
            costs.complete = False
        for cost in costs.parts.values():
            costs.total.plus(cost)
        return costs if by != "key" else await self._named(costs)

    async def _named(self, costs: Costs) -> Costs:
        """The same with names instead of ids: revoked keys may have had one name."""
        names = {row["key_id"]: row["name"] for row in await self._db.all("SELECT key_id, name FROM keys")}
        found = dict[str | None, Cost]()
        for key_id, cost in costs.parts.items():
            found.setdefault(names.get(key_id, key_id), Cost()).plus(cost)
        return replace(costs, parts=found)

    def _add(self, costs: Costs, rows: Iterable[Row], by: By) -> None:
        for row in rows:
            found = of_call(row, self._prices, self._alias)
            if (part := self._part(row, by)) not in costs.parts:
                costs.parts[part] = Cost()
            costs.parts[part].add(*found)
            costs.since = min(row["started_at"], costs.since or row["started_at"])

    def _part(self, row: Row, by: By) -> str | None:
        if by == "day":
            return time.strftime("%Y-%m-%d", time.gmtime(row["started_at"]))
        if by == "model" and row["policy_version"] is not None:
            return self._alias  # a version is served by a name of its own
        column = {"model": "model", "key": "key_id", "task": "task_id", "rollout": "rollout_id", "mode": "mode"}[by]
        found: str | None = row[column]
        return found


router = APIRouter(tags=["costs"], route_class=UserRoute)


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


@router.get("/costs", response_model=CostPage)
async def get_costs(request: ControlRequest, by: By = "day", since: Finite = 0.0, limit: Limit = 100) -> dict[str, Any]:
    """What calls used and cost, by UTC day (newest first), model, key, task, rollout or mode (dearest first).

    `since` is Unix time. A key that sees only its own rollouts gets the costs of these.
    """
    p = request.parts
    costs = await CostTable(p.store.database, p.config).newest(by, since, request.caller.sees)
    parts = sorted(costs.parts.items(), key=lambda part: (part[1].usd, part[1].used.input), reverse=True)
    if by == "day":
        parts.sort(key=lambda part: part[0] or "", reverse=True)
    data = [{"name": name} | cost.view() for name, cost in parts[:limit]]
    return {"by": by, "data": data, "total": costs.total.view(), "since": costs.since, "complete": costs.complete}


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
        total, calls = await CostTable(store.database, self.config).of_rollout(rollout_id)
        return {"costs": total.view() | {"of_calls": {name: cost.view() for name, cost in calls.items()}}}


plugin = CostsPlugin
