"""Runs the rewarders that completed rollouts wait for. Adds routes for people who rate, and `spent` to the status."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel

from ...core.errors import Forbidden, NotFound
from ...proxy.api.bodies import Limit, Listed, PathId
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.api.status import Status
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.database import Transaction
from ...store.rewards import count_returns
from ...store.store import Store
from .model import spent_by_each
from .rewarders import ModelRewarder
from .scoring import Scorer, all_rewarders, check

log = logging.getLogger(__name__)
TAKE_BACK = """
DELETE FROM rewards WHERE reward_id = :reward_id AND rollout_id = :rollout_id
    AND name = 'human' AND (:any OR key_id IS :key_id) RETURNING reward_id
"""
# Of the newest 5,000 rollouts that were opened with one key, or of all, the ones that this person has not rated.
_OF_KEY = "SELECT * FROM rollouts WHERE key_id = :key_id ORDER BY n DESC LIMIT 5000"
_OF_ALL = """
SELECT * FROM rollouts WHERE n > COALESCE((SELECT n FROM rollouts WHERE n > 0 ORDER BY n DESC LIMIT 1 OFFSET 5000), 0)
"""
QUEUE = """
WITH seen AS ({seen})
SELECT rollout_id, task_id FROM seen
WHERE status IN ('completed', 'failed') AND calls > 0 AND NOT EXISTS (
    SELECT 1 FROM rewards WHERE rewards.rollout_id = seen.rollout_id AND name = 'human' AND source = :person
)
ORDER BY n DESC LIMIT :limit
"""
router = APIRouter(tags=["rewards"], route_class=UserRoute)


class Unrated(BaseModel):
    rollout_id: str
    task_id: str | None


@router.get("/people/queue", response_model=Listed[Unrated])
async def get_queue(
    request: ControlRequest, person: Annotated[str, Query(min_length=1, max_length=200)], limit: Limit = 50
) -> Any:
    """Rollouts that `person` has not rated, newest first: completed or failed ones among the newest 5,000."""
    key_id = request.caller.sees
    statement = QUEUE.format(seen=_OF_ALL if key_id is None else _OF_KEY)
    wanted = {"person": person, "limit": limit, "key_id": key_id}
    return {"data": [dict(row) for row in await request.parts.store.database.all(statement, wanted)]}


@router.delete("/rollouts/{rollout_id}/rewards/{reward_id}", status_code=204)
async def take_back_reward(
    request: ControlRequest, rollout_id: PathId, reward_id: Annotated[int, Path(ge=0, lt=2**63)]
) -> None:
    """Delete a reward named `human`. An admin may delete any; other keys may delete only the rewards that they gave."""
    caller = request.caller
    if caller.rollout is not None:
        raise Forbidden("a rollout's own key cannot delete rewards")
    row = {"rollout_id": rollout_id, "reward_id": reward_id, "any": caller.is_admin, "key_id": caller.key_id}

    async def work(db: Transaction) -> None:
        if not await db.all(TAKE_BACK, row):
            raise NotFound(f"rollout {rollout_id!r} has no reward {reward_id} named human that this key may delete")
        await count_returns(db, [rollout_id])

    await request.parts.store.database.write(work)


class Spent(BaseModel):
    name: str
    tokens: int
    usd: float


class StatusSpent(BaseModel):
    """`spent`: what the models of each rewarder have used and cost so far."""

    spent: list[Spent]


class RewardersPlugin(ProxyPlugin):
    routers = (router,)
    fields = ((Status, StatusSpent),)

    async def check(self) -> None:
        await check(self.config)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        rewarders = all_rewarders(self.config, core.store.database)
        for one in rewarders:
            if isinstance(one, ModelRewarder) and one.config.model is not None:
                where = urlsplit(one.config.address).hostname
                log.info("%s: %s at %s reads rollouts", one.label, one.config.model, where)
        first = rewarders[0].label if rewarders else None
        await core.store.rollouts.use_function(self.config.rewards.function or first)
        scorer = Scorer(self.config, core.store, rewarders, core.metrics.rewards.inc)
        yield Hooks(work=(scorer.run,) if rewarders else ())

    async def status_fields(self, store: Store, key_id: str | None) -> Fields:
        return {"spent": [] if key_id is not None else await spent_by_each(store.database)}


plugin = RewardersPlugin
