"""`POST /agl/api/rollouts/{id}/attempt/0/events`: takes the events of agents of Agent Lightning 1.0 (AGL_EVENT_URL).

A `reward` event rewards the rollout and ends it; the newest reward counts. Any other event becomes a note.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, ValidationError

from ...core.errors import Unprocessable
from ...proxy.api.bodies import PathId
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.api.rollouts import RewardBody, ValueBody, post_events, post_reward
from ...proxy.hooks import ProxyPlugin

router = APIRouter(tags=["agl"], route_class=UserRoute)


class AglEvent(BaseModel):
    """An event. A reward event has `data.value`, and may have `data.reason`."""

    event_type: Annotated[str, Field(min_length=1, max_length=200)]
    data: dict[str, Any] = {}


@router.post("/agl/api/rollouts/{rollout_id}/attempt/0/events", response_model=None)
async def post_event(request: ControlRequest, rollout_id: PathId, body: AglEvent) -> Any:
    """Record an event in the format of Agent Lightning 1.0."""
    if body.event_type != "reward":
        note = ValueBody(kind="note", name=body.event_type, value=body.data)
        return await post_events(request, rollout_id, note, None)
    given = {"rollout_id": rollout_id, "reward": body.data.get("value"), "comment": body.data.get("reason")}
    try:
        reward = RewardBody.model_validate(given | {"source": "agl"})
    except ValidationError as error:
        wrong = error.errors()[0]
        where = {"reward": "data.value", "comment": "data.reason"}.get(str(wrong["loc"][0]), "rollout_id")
        raise Unprocessable(f"{where}: {wrong['msg']}, got {wrong['input']!r:.80}", param="data") from None
    return await post_reward(request, reward, None)


class AglPlugin(ProxyPlugin):
    routers = (router,)


plugin = AglPlugin
