"""What people who rate rollouts need besides `POST /reward`: a queue, and the way back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel

from ...core.errors import Forbidden
from ...proxy.api.answers import ERRORS, answers
from ...proxy.api.bodies import PathId
from ...proxy.api.requests import AgentRoute, Limit, caller_of, json_response, parts_for, parts_for_all
from .people import Order, PeopleTable

router = APIRouter(tags=["rewards"], responses=ERRORS, route_class=AgentRoute)


class Unrated(BaseModel):
    rollout_id: str
    task_id: str | None
    reward: float | None


class UnratedList(BaseModel):
    data: list[Unrated]


@router.get("/people/queue", response_model=None, responses=answers(UnratedList))
async def get_queue(
    request: Request,
    person: Annotated[str, Query(min_length=1, max_length=200)],
    order: Order = "newest",
    limit: Limit = 50,
) -> Any:
    """Ended rollouts that this person (a `source`) has not rated; `uncertain`: first those with a middling reward."""
    p, sight = await parts_for_all(request), caller_of(request).sight
    rows = await PeopleTable(p.store.database).queue(person, order, limit, sight.key_id)
    return json_response({"data": [dict(row) for row in rows]})


@router.delete("/rollouts/{rollout_id}/rewards/{reward_id}", status_code=204)
async def take_back_reward(
    request: Request, rollout_id: PathId, reward_id: Annotated[int, Path(ge=0, lt=2**63)]
) -> None:
    """Take back a reward named `human` that was posted with the same key, or any as an admin.

    All of `proxy.api_keys` count as one key.
    """
    p, caller = await parts_for(request, rollout_id), caller_of(request)
    if caller.rollout is not None:
        raise Forbidden("a rollout's own key takes back no reward")
    table = PeopleTable(p.store.database)
    await table.take_back(rollout_id, reward_id, caller.key_id, of_any=caller.is_admin)
