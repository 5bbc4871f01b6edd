"""`GET /environments`: what the newest rollouts earned in each environment."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ...core.records import Mode
from ...proxy.api.answers import ERRORS, answers
from ...proxy.api.requests import AgentRoute, caller_of, large_response, parts_for_all
from .table import EnvironmentTable

router = APIRouter(tags=["tasks"], responses=ERRORS, route_class=AgentRoute)


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


@router.get("/environments", response_model=None, responses=answers(EnvironmentList))
async def get_environments(request: Request, mode: Mode | None = None) -> Response:
    """What rollouts earned in each environment, of the newest 10,000 rollouts; the environment used last comes first.

    A rollout is in the environment that its first note named `environment` says, as `run --environment` posts it.
    """
    p = await parts_for_all(request)
    found = await EnvironmentTable(p.store.database).newest(mode, caller_of(request).sight.key_id)
    return await large_response(lambda: {"data": found})
