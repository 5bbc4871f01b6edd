"""Thumbs in an application: its server asks for a key, and its page gives one call a value with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError

from ..control.answers import ERRORS, answers
from ..control.bodies import Body, Number, PathId
from ..control.door import AgentRoute
from ..control.requests import caller_of, json_response, parts, parts_for
from ..errors import Forbidden, LightningError, TooLarge, Unprocessable
from ..gateway.asgi import ClientDisconnected, read_headers
from .config import PeopleKeys
from .table import PeopleTable

router = APIRouter(tags=["rewards"], responses=ERRORS, route_class=AgentRoute)
open_router = APIRouter(include_in_schema=False)  # the key in the body is enough

SNIPPET = Path(__file__).with_name("thumbs.js")
MOST_BYTES = 500
DAY_S = 86_400.0


class RewardKeyBody(Body):
    """How long a key lasts, and whether its reward counts where a new version is tested."""

    expires_in_s: Annotated[float, Field(gt=0, le=30 * DAY_S)] = DAY_S
    evidence: Annotated[bool, Field(strict=True)] = False


class RewardKey(BaseModel):
    key: str
    expires_at: float


class ThumbBody(Body):
    key: str
    value: Annotated[Number, Field(ge=-1, le=1)]


@router.post("/rollouts/{rollout_id}/calls/{call_id}/reward-key", response_model=None, responses=answers(RewardKey))
async def make_reward_key(
    request: Request, rollout_id: PathId, call_id: PathId, body: RewardKeyBody | None = None
) -> Any:
    """Make a key for one value of this call, from -1 to 1, named `human`. It may be changed until the key expires."""
    p, caller, body = await parts_for(request, rollout_id), caller_of(request), body or RewardKeyBody()
    if not PeopleKeys.of(p.config.rewards).origins:
        raise Forbidden("rewards.origins names no application: add yours, as in https://chat.example.com")
    if body.evidence and not caller.evidence:
        raise Forbidden("evidence: ask with an admin's key, or one of `keys create NAME --evaluator`", param="evidence")
    expires_at = time.time() + body.expires_in_s
    by = caller.sender._replace(evidence=body.evidence)
    key = await PeopleTable(p.store.database).make_key(rollout_id, call_id, by, expires_at)
    return json_response({"key": key, "expires_at": expires_at})


@open_router.post("/thumb")
async def post_thumb(request: Request) -> Response:
    """Record a value. The page sends it as plain text, so that its browser asks for nothing before."""
    origin = request.headers.get("origin", "")
    if origin not in PeopleKeys.of(parts(request).config.rewards).origins:
        raise Forbidden("the Origin of this request is not in rewards.origins")
    headers = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    try:
        await _reward(request)
    except ClientDisconnected:
        return Response(status_code=400)  # to nobody
    except LightningError as error:
        own = {name.decode(): value.decode() for name, value in error.headers}
        return JSONResponse(error.body(), error.status, headers | own)
    return Response(status_code=204, headers=headers)


async def _reward(request: Request) -> None:
    p, headers = parts(request), read_headers(request.scope)
    length = headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        raise TooLarge(f"a thumb has a Content-Length of at most {MOST_BYTES}")
    try:
        with p.bodies.memory.loan(None) as loan:
            given = ThumbBody.model_validate_json(await p.bodies.read(request.receive, headers, loan))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise Unprocessable(": ".join([*map(str, wrong["loc"]), wrong["msg"]])) from None
    p.config.rewards.require(given.value, "value")
    await PeopleTable(p.store.database).reward(given.key, given.value)
    p.metrics.rewards.inc()


@open_router.get("/thumbs.js")
async def get_snippet() -> Response:
    """The snippet that draws the thumbs."""
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(SNIPPET.read_bytes(), headers=headers, media_type="text/javascript; charset=utf-8")
