"""`GET /environments`: which environment the newest rollouts were in, and what they earned there by name."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from ...core.json_text import dumps, loads_or_none
from ...core.records import Mode
from ...core.statistics import bootstrap_mean, mean_and_spread
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.hooks import ProxyPlugin
from ...store.database import Database, Row
from ...store.rollouts import ROLLOUT_FILTERS

router = APIRouter(tags=["tasks"], route_class=UserRoute)
NEWEST = 10_000  # rollouts that are looked at
PLAYED = """
SELECT recent.*, events.value AS environment FROM (
    SELECT n, rollout_id, task_id, status, reward, COALESCE(ended_at, created_at) AS at
    FROM rollouts WHERE TRUE {filters} ORDER BY n DESC LIMIT :limit
) AS recent CROSS JOIN events ON events.rollout_id = recent.rollout_id
WHERE events.kind = 'note' AND events.name = 'environment' ORDER BY recent.n DESC, events.event_id
"""
EARNED = """
SELECT rollouts.rollout_id, reward_id, name, value
FROM rollouts CROSS JOIN rewards ON rewards.rollout_id = rollouts.rollout_id
WHERE rollouts.rollout_id IN (SELECT CAST(value AS TEXT) FROM json_each(:rollout_ids))
      AND call_id IS NULL AND name <> 'reward'
"""


class NamedReward(BaseModel):
    """Mean over tasks of what has this name, and its 95 % interval; null if there is one task alone."""

    name: str
    rollouts: int
    mean: float
    low: float | None
    high: float | None


class EnvironmentSeen(BaseModel):
    """`rewards`: first `reward`, each rollout's return; then the rewards of other names, as seats and measures have."""

    environment: str
    rollouts: int
    running: int
    failed: int
    tasks: int
    last_at: float
    rewards: list[NamedReward]


class EnvironmentList(BaseModel):
    data: list[EnvironmentSeen]


@router.get("/environments", response_model=EnvironmentList)
async def get_environments(request: ControlRequest, mode: Mode | None = None) -> dict[str, Any]:
    """What rollouts earned in each environment, of the newest 10,000 rollouts; the environment used last comes first.

    A rollout is in the environment that its first note named `environment` says, as `run --environment` posts it.
    """
    found = await EnvironmentTable(request.parts.store.database).newest(mode, request.caller.sees)
    return {"data": found}


class EnvironmentTable:
    """Reads rollouts by their environments."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def newest(self, mode: Mode | None, key_id: str | None) -> list[dict[str, Any]]:
        """Return the environments of the newest rollouts as JSON; with `key_id`, of those opened with this key."""
        filters = {name: value for name, value in (("mode", mode), ("key_id", key_id)) if value is not None}
        statement = PLAYED.format(filters=" ".join(ROLLOUT_FILTERS[name] for name in filters))
        played = await self._db.all(statement, {**filters, "limit": NEWEST})
        earned = await self._db.all(EARNED, {"rollout_ids": dumps([row["rollout_id"] for row in played])})
        return await asyncio.to_thread(_environments, played, earned)


def _environments(played: Sequence[Row], earned: Sequence[Row]) -> list[dict[str, Any]]:
    by_name: dict[str, dict[str, float]] = {}  # of each rollout, the newest reward of each name
    for row in sorted(earned, key=lambda row: int(row["reward_id"])):
        by_name.setdefault(row["rollout_id"], {})[row["name"]] = row["value"]
    of: dict[str, dict[str, Row]] = {}  # of each environment, its rollouts
    seen: set[str] = set()
    for row in played:
        name = loads_or_none(row["environment"])
        if isinstance(name, str) and row["rollout_id"] not in seen:
            seen.add(row["rollout_id"])
            of.setdefault(name, {})[row["rollout_id"]] = row
    return [_environment(name, rollouts, by_name) for name, rollouts in of.items()]


def _environment(name: str, rollouts: dict[str, Row], by_name: dict[str, dict[str, float]]) -> dict[str, Any]:
    # By name of the reward, by task.
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rollout_id, row in rollouts.items():
        returned = {} if row["reward"] is None else {"reward": row["reward"]}
        for one, value in (returned | by_name.get(rollout_id, {})).items():
            values[one][row["task_id"] or rollout_id].append(value)
    status = Counter(row["status"] for row in rollouts.values())
    names = sorted(values, key=lambda one: (one != "reward", one))
    return {
        "environment": name,
        "rollouts": len(rollouts),
        "running": status["running"],
        "failed": status["failed"],
        "tasks": len({row["task_id"] or rollout_id for rollout_id, row in rollouts.items()}),
        "last_at": max(row["at"] for row in rollouts.values()),
        "rewards": [{"name": one} | _summed([*values[one].values()]) for one in names],
    }


def _summed(tasks: Sequence[Sequence[float]]) -> dict[str, Any]:
    means = [mean_and_spread(values)[0] for values in tasks]
    sure = bootstrap_mean(means, 0) if len(means) > 1 else None
    low, high = (None, None) if sure is None else (sure.low, sure.high)
    return {"rollouts": sum(map(len, tasks)), "mean": mean_and_spread(means)[0], "low": low, "high": high}


class EnvironmentsPlugin(ProxyPlugin):
    """Says what rollouts earned in each environment."""

    routers = (router,)


plugin = EnvironmentsPlugin
