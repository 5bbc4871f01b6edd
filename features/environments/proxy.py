"""`GET /environments`: which environment the newest rollouts were in, and what they earned there by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from ...core.json_text import loads_or_none
from ...core.records import Mode
from ...core.statistics import bootstrap_mean
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.hooks import ProxyPlugin
from ...store.database import Row
from ...store.rollouts import ROLLOUT_FILTERS

router = APIRouter(tags=["tasks"], route_class=UserRoute)
NEWEST = 10_000  # rollouts that are looked at
PLAYED = """
WITH recent AS (
    SELECT n, rollout_id, COALESCE(task_id, rollout_id) AS task, status, reward, COALESCE(ended_at, created_at) AS at
    FROM rollouts WHERE TRUE {filters} ORDER BY n DESC LIMIT :limit
), played AS (
    SELECT recent.*, (
        SELECT value FROM events WHERE events.rollout_id = recent.rollout_id
        AND kind = 'note' AND name = 'environment' ORDER BY event_id LIMIT 1
    ) AS environment FROM recent
)
"""
SEEN = """{played}
SELECT environment, COUNT(*) AS rollouts, COUNT(DISTINCT task) AS tasks, MAX(at) AS last_at,
    SUM(CASE WHEN status = 'running' THEN 1 ELSE 0 END) AS running,
    SUM(CASE WHEN status = 'failed' THEN 1 ELSE 0 END) AS failed
FROM played WHERE environment IS NOT NULL GROUP BY environment ORDER BY MAX(n) DESC
"""
# Of each rollout, its return, and the newest reward of each other name.
EARNED = """{played}
SELECT environment, name, COUNT(*) AS rollouts, AVG(value) AS mean FROM (
    SELECT environment, task, 'reward' AS name, reward AS value FROM played
    WHERE environment IS NOT NULL AND reward IS NOT NULL
    UNION ALL
    SELECT environment, task, rewards.name, rewards.value
    FROM played CROSS JOIN rewards ON rewards.rollout_id = played.rollout_id
    WHERE environment IS NOT NULL AND call_id IS NULL AND rewards.name <> 'reward' AND reward_id = (
        SELECT MAX(reward_id) FROM rewards AS newer
        WHERE newer.rollout_id = rewards.rollout_id AND newer.call_id IS NULL AND newer.name = rewards.name
    )
) AS earned GROUP BY environment, name, task ORDER BY environment, name <> 'reward', name, task
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
    database = request.parts.store.database
    given = (("mode", mode), ("key_id", request.caller.sees))
    filters = {name: value for name, value in given if value is not None}
    played = PLAYED.format(filters=" ".join(ROLLOUT_FILTERS[name] for name in filters))
    seen, earned = [
        await database.all(what.format(played=played), {**filters, "limit": NEWEST}) for what in (SEEN, EARNED)
    ]
    rewards: dict[str, list[dict[str, Any]]] = {}
    for (environment, name), tasks in groupby(earned, lambda row: (row["environment"], row["name"])):
        rewards.setdefault(environment, []).append({"name": name} | _summed([*tasks]))
    names = {row["environment"]: loads_or_none(row["environment"]) for row in seen}
    return {
        "data": [
            {**row, "environment": names[row["environment"]], "rewards": rewards.get(row["environment"], [])}
            for row in seen
            if isinstance(names[row["environment"]], str)
        ]
    }


def _summed(tasks: Sequence[Row]) -> dict[str, Any]:
    means = [row["mean"] for row in tasks]
    sure = bootstrap_mean(means, 0) if len(means) > 1 else None
    low, high = (None, None) if sure is None else (sure.low, sure.high)
    return {"rollouts": sum(row["rollouts"] for row in tasks), "mean": fmean(means), "low": low, "high": high}


class EnvironmentsPlugin(ProxyPlugin):
    """Says what rollouts earned in each environment."""

    routers = (router,)


plugin = EnvironmentsPlugin
