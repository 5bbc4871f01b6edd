"""`/rollouts`: opening, reading, ending and deleting them. Contract, section 3."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Header, Request, Response

from ..errors import InvalidRequest, TooLarge
from ..gateway.naming import DataPath, name_rollout
from ..json_text import dumps
from ..store.keys import hash_key, new_key
from ..types import Event, Rollout, RolloutName, check_id
from .answers import ERRORS, EventRecorded, Opened, RolloutDetail, RolloutPage, Transitions, answers
from .bodies import Cursor, EndBody, EventBody, EventList, Id, PathId, RolloutsBody
from .requests import Limit, json_response, own_key, parts, parts_for, redacted_text
from .transitions import transitions
from .views import rollout_detail

router = APIRouter(prefix="/rollouts", tags=["rollouts"], responses=ERRORS)


@router.post("", response_model=None, responses=answers(list[Opened]))
async def open_rollouts(request: Request, body: RolloutsBody) -> list[dict[str, str]]:
    """Open n sibling rollouts, each with a base URL and a key of its own."""
    p = parts(request)
    caller = await p.keys.require_agent(request.headers)
    names = [RolloutName(uuid4().hex, body.task_id, None, body.mode) for _ in range(body.n)]
    keys = [new_key("rollout") for _ in names]
    hashed = [(n, hash_key(key)) for n, key in zip(names, keys, strict=True)]
    await p.model_check.require(body.policy_version, body.model)
    metadata = p.redactor.value(body.metadata, "metadata")
    most = int(p.config.proxy.max_body_mb * 1_000_000)
    if body.n * len(dumps(metadata)) > most:
        raise TooLarge(f"metadata: {body.n} copies are larger than {most} bytes (proxy.max_body_mb)", param="metadata")
    await p.store.rollouts.open(hashed, metadata, caller.key_id, policy_version=body.policy_version, model=body.model)
    root = str(request.base_url).rstrip("/")
    return [
        {"rollout_id": n.rollout_id, "base_url": f"{root}/rollouts/{n.rollout_id}/v1", "api_key": key}
        for n, key in zip(names, keys, strict=True)
    ]


@router.get("", response_model=None, responses=answers(RolloutPage))
async def list_rollouts(
    request: Request,
    status: Literal["running", "completed", "failed", "discarded"] | None = None,
    task_id: Id | None = None,
    agent: Id | None = None,
    mode: Literal["train", "eval"] | None = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Rollouts, newest first, a page at a time."""
    p = parts(request)
    await p.keys.require_agent(request.headers)
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidRequest("cursor must be the next_cursor of an earlier page", param="cursor")
    wanted = {"status": status, "task_id": task_id, "agent": agent, "mode": mode}
    filters = {name: value for name, value in wanted.items() if value is not None}
    page, following = await p.store.rollouts.page(filters, limit, int(cursor) if cursor else None)
    return {
        "data": [asdict(rollout) for rollout in page],
        "next_cursor": None if following is None else str(following),
    }


@router.get("/{rollout_id}", response_model=None, responses=answers(RolloutDetail))
async def get_rollout(request: Request, rollout_id: PathId) -> Response:
    """A rollout with its calls in order and its rewards."""
    p = await parts_for(request, rollout_id)
    rollout = await p.store.rollouts.get(rollout_id)
    calls, rewards = await p.store.calls.of(rollout_id), await p.store.rewards.of(rollout_id)
    return json_response(rollout_detail(rollout, calls, rewards, await p.store.events.of(rollout_id)))


@router.get("/{rollout_id}/transitions", response_model=None, responses=answers(Transitions))
async def get_transitions(request: Request, rollout_id: PathId) -> Response:
    """The rollout as transitions of a Markov decision process."""
    p = await parts_for(request, rollout_id)
    rollout, calls = await p.store.rollouts.get(rollout_id), await p.store.calls.of(rollout_id)
    made = transitions(rollout, calls, await p.store.events.of(rollout_id))
    return json_response({"data": [asdict(transition) for transition in made]})


@router.post("/{rollout_id}/events", response_model=None, responses=answers(EventRecorded | list[EventRecorded]))
async def post_events(
    request: Request,
    rollout_id: PathId,
    body: EventBody | EventList,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Any:
    """Record what a rollout's agent did or saw between its calls: one event, or a list (all or none).

    A rollout unknown so far is opened, by an empty list too. Its task, agent and mode are those of the request's
    headers, as for a call.
    """
    p = await parts_for(request, rollout_id)
    headers = {name: value for name, value in request.headers.items() if name != "x-rollout-id"}
    name = name_rollout(DataPath("", rollout_id), headers)
    bodies = body if isinstance(body, list) else [body]
    events = [p.redactor.event(Event(**b.model_dump())) for b in bodies]
    answer = await p.store.events.post(name, events, own_key(request, idempotency_key), await request.body())
    return answer if isinstance(body, list) else answer[0]


@router.post("/{rollout_id}/end", response_model=None, responses=answers(Rollout))
async def end_rollout(request: Request, rollout_id: PathId, body: EndBody) -> dict[str, Any]:
    """End a rollout without a reward."""
    p = await parts_for(request, rollout_id)
    return asdict(await p.store.rollouts.end(rollout_id, body.status, redacted_text(p, body.reason)))


@router.delete("/{rollout_id}", status_code=204)
async def delete_rollout(request: Request, rollout_id: PathId) -> None:
    """Delete an ended rollout with its calls, tokens and rewards, for good."""
    p = parts(request)
    p.keys.require_admin(request.headers)
    await p.store.rollouts.delete(check_id(rollout_id, "rollout_id"))
    p.forget(rollout_id, "request")
