"""The control API: rewards, rollouts, policy, health. Contract, sections 2 and 3."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from ..conversation.continuation import scope_of
from ..errors import InvalidRequest, LightningError
from ..gateway.naming import DataPath, name_rollout
from ..json_text import dumps
from ..store.events import redacted
from ..store.keys import hash_key, new_key
from ..types import Event, PolicyVersion, Reward, Rollout, RolloutName, check_id
from ..upstreams.health import replica_name
from . import views
from .answers import (
    ERRORS,
    Opened,
    Policy,
    Ready,
    Rewarded,
    RolloutDetail,
    RolloutPage,
    Steps,
    Told,
    Transitions,
    Versions,
    answers,
)
from .bodies import Cursor, EndBody, EventBody, EventList, Id, PathId, PromoteBody, RewardBody, RolloutsBody
from .parts import Parts

router = APIRouter(responses=ERRORS)

Limit = Annotated[int, Query(ge=1, le=1000)]


def parts(request: Request) -> Parts:
    found: Parts = request.app.state.parts
    return found


@router.post("/reward", tags=["rewards"], response_model=None, responses=answers(Rewarded | list[Rewarded]))
async def post_reward(
    request: Request,
    body: RewardBody | list[RewardBody],
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Any:
    """Record one reward, or a list of them (all or none)."""
    bodies = body if isinstance(body, list) else [body]
    p = parts(request)
    await p.keys.require_agent(request.headers, {b.rollout_id for b in bodies})
    rewards = [_reward(p, b) for b in bodies]
    answer = await p.store.post_rewards(rewards, _own(request, idempotency_key), await request.body())
    p.metrics.rewards.inc(len(answer))
    return _json(answer if isinstance(body, list) else answer[0])  # FastAPI takes long to look through a long list


def _own(request: Request, idempotency_key: str | None) -> str | None:
    """The key as that of whoever sent it: the same one from another API key is another one."""
    scope = scope_of(request.headers)
    if idempotency_key is None or not scope.strip():
        return idempotency_key
    return f"{blake2b(scope.encode(), digest_size=16).hexdigest()} {idempotency_key}"


def _reward(p: Parts, body: RewardBody) -> Reward:
    final = body.call_id is None if body.final is None else body.final
    source, comment = _redacted(p, body.source), _redacted(p, body.comment)
    return Reward(body.rollout_id, body.reward, body.call_id, body.name, source, comment, final, body.retrain)


def _redacted(p: Parts, text: str | None) -> str | None:
    return None if text is None else p.redactor.text(text)


@router.post("/rollouts", tags=["rollouts"], response_model=None, responses=answers(list[Opened]))
async def open_rollouts(request: Request, body: RolloutsBody) -> list[dict[str, str]]:
    """Open n sibling rollouts, each with a base URL and a key of its own."""
    p = parts(request)
    caller = await p.keys.require_agent(request.headers)
    names = [RolloutName(uuid4().hex, body.task_id, None, body.mode) for _ in range(body.n)]
    keys = [new_key("rollout") for _ in names]
    hashed = [(n, hash_key(key)) for n, key in zip(names, keys, strict=True)]
    await p.chosen.check(body.policy_version, body.model)
    metadata = p.redactor.value(body.metadata, "metadata")
    await p.store.open_rollouts(hashed, metadata, caller.key_id, policy_version=body.policy_version, model=body.model)
    root = str(request.base_url).rstrip("/")
    return [
        {"rollout_id": n.rollout_id, "base_url": f"{root}/rollouts/{n.rollout_id}/v1", "api_key": key}
        for n, key in zip(names, keys, strict=True)
    ]


@router.get("/rollouts", tags=["rollouts"], response_model=None, responses=answers(RolloutPage))
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
    page, following = await p.store.rollouts(filters, limit, int(cursor) if cursor else None)
    return {
        "data": [views.rollout_view(rollout) for rollout in page],
        "next_cursor": None if following is None else str(following),
    }


@router.get("/rollouts/{rollout_id}", tags=["rollouts"], response_model=None, responses=answers(RolloutDetail))
async def get_rollout(request: Request, rollout_id: PathId) -> Response:
    """A rollout with its calls in order and its rewards."""
    p = await _reader(request, rollout_id)
    rollout = await p.store.rollout(rollout_id)
    calls, rewards = await p.store.calls(rollout_id), await p.store.rewards(rollout_id)
    return _json(views.rollout_detail(rollout, calls, rewards, await p.events.of(rollout_id)))


@router.get(
    "/rollouts/{rollout_id}/transitions", tags=["rollouts"], response_model=None, responses=answers(Transitions)
)
async def get_transitions(request: Request, rollout_id: PathId) -> Response:
    """The rollout as transitions of a Markov decision process."""
    p = await _reader(request, rollout_id)
    rollout, calls = await p.store.rollout(rollout_id), await p.store.calls(rollout_id)
    found = views.transitions(rollout, calls, await p.events.of(rollout_id))
    return _json({"data": [views.transition_view(transition) for transition in found]})


def _json(value: Any) -> Response:
    """Recorded texts may hold what UTF-8 cannot; it is escaped."""
    return Response(dumps(value), media_type="application/json")


@router.post(
    "/rollouts/{rollout_id}/events", tags=["rollouts"], response_model=None, responses=answers(Told | list[Told])
)
async def post_events(
    request: Request,
    rollout_id: PathId,
    body: EventBody | EventList,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Any:
    """Record what a rollout's agent did or saw between its calls: one event, or a list (all or none).

    A rollout unknown so far is opened, by an empty list too, with the task, agent and mode that the headers of a call
    would name.
    """
    p = await _reader(request, rollout_id)
    headers = {name: value for name, value in request.headers.items() if name != "x-rollout-id"}
    name = name_rollout(DataPath("", rollout_id), headers)
    bodies = body if isinstance(body, list) else [body]
    events = [redacted(Event(**b.model_dump()), p.redactor) for b in bodies]
    answer = await p.events.post(name, events, _own(request, idempotency_key), await request.body())
    return answer if isinstance(body, list) else answer[0]


@router.post("/rollouts/{rollout_id}/end", tags=["rollouts"], response_model=None, responses=answers(Rollout))
async def end_rollout(request: Request, rollout_id: PathId, body: EndBody) -> dict[str, Any]:
    """End a rollout without a reward."""
    p = await _reader(request, rollout_id)
    return views.rollout_view(await p.store.end_rollout(rollout_id, body.status, _redacted(p, body.reason)))


@router.delete("/rollouts/{rollout_id}", tags=["rollouts"], status_code=204)
async def delete_rollout(request: Request, rollout_id: PathId) -> None:
    """Delete an ended rollout with its calls, tokens and rewards, for good."""
    p = parts(request)
    p.keys.require_admin(request.headers)
    await p.store.delete_rollout(check_id(rollout_id, "rollout_id"))
    p.forget(rollout_id, "request")


async def _reader(request: Request, rollout_id: str) -> Parts:
    p = parts(request)
    await p.keys.require_agent(request.headers, {check_id(rollout_id, "rollout_id")})
    return p


@router.get("/policy", tags=["policy"], response_model=None, responses=answers(Policy))
async def get_policy(request: Request) -> dict[str, Any]:
    """The live version, how it is served, the last training step, and the collapse that publication is stopped for."""
    p = parts(request)
    await p.keys.require_agent(request.headers)
    live, last = await p.ledger.live(), await p.ledger.last_step()
    return {
        "alias": p.policy.alias,
        "live_version": live.version,
        "served_model": live.served_model,
        "adapters": live.adapters,
        "publish": p.publish,
        "live_at": live.live_at,
        "steps": last.step if last else 0,
        "last_step": views.step_view(last) if last else None,
        "collapse": views.collapse_view(await p.ledger.collapse()),
    }


@router.get("/policy/versions", tags=["policy"], response_model=None, responses=answers(Versions))
async def get_versions(request: Request) -> dict[str, Any]:
    """Every policy version, oldest first, with the metrics of the step that made it."""
    p = parts(request)
    await p.keys.require_agent(request.headers)
    live = (await p.ledger.live()).version
    return {"data": [views.version_view(version, live) for version in await p.ledger.versions()]}


@router.get("/policy/steps", tags=["policy"], response_model=None, responses=answers(Steps))
async def get_steps(request: Request, limit: Limit = 40) -> dict[str, Any]:
    """The last training steps, newest first, with all that they report (docs/metrics.md)."""
    p = parts(request)
    await p.keys.require_agent(request.headers)
    return {"data": [views.step_view(step) for step in await p.ledger.newest_steps(limit)]}


@router.post("/policy/promote", tags=["policy"], response_model=None, responses=answers(PolicyVersion))
async def promote(request: Request, body: PromoteBody) -> dict[str, Any]:
    """Make a version live; the trainer goes on from it."""
    p = parts(request)
    p.keys.require_admin(request.headers)
    return views.version_view(await p.policy.promote(body.version), body.version)


@router.post("/policy/rollback", tags=["policy"], response_model=None, responses=answers(PolicyVersion))
async def rollback(request: Request) -> dict[str, Any]:
    """Make the version before the live one live again; the trainer goes on from it."""
    p = parts(request)
    p.keys.require_admin(request.headers)
    live = await p.policy.rollback()
    return views.version_view(live, live.version)


@router.get("/healthz", tags=["health"])
async def healthz() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}


@router.get("/readyz", tags=["health"], responses=answers(Ready) | answers(Ready, 503))
async def readyz(request: Request) -> Response:
    """Store and policy can be reached: 200, or 503 and which cannot; `down` names every watched server that is down."""
    p = parts(request)
    checks = {"store": "ok", "upstream": "ok"}
    try:
        await p.ledger.live()
    except LightningError as error:
        checks["store"] = error.message
    if not await p.policy.reachable():
        checks["upstream"] = "not reachable"
    ready = all(value == "ok" for value in checks.values())
    down = [f"{name} {replica_name(url)}" for (name, url), problem in p.health.problems.items() if problem is not None]
    view = {"status": "ready" if ready else "not ready", **checks} | ({"down": down} if down else {})
    return JSONResponse(view, 200 if ready else 503)


@router.get("/metrics", tags=["health"], response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    p = parts(request)
    p.metrics.queue.set(p.recorder.depth)
    p.metrics.live_version.set((await p.ledger.live()).version)
    trainer = p.config.trainer
    lone, failed = trainer.lone_rollouts == "running", trainer.failed_reward is not None
    p.metrics.waiting.set(await p.ledger.waiting(lone=lone, failed=failed))
    p.metrics.stopped_for(await p.ledger.collapse())
    if (last := await p.ledger.last_step()) is not None:
        p.metrics.step_ended(last.step, last.metrics)
    for (mode, status), count in (await p.store.rollout_counts()).items():
        p.metrics.rollouts.labels(mode, status).set(count)
    for (name, url), problem in p.health.problems.items():
        p.metrics.upstream_up.labels(name, replica_name(url)).set(problem is None)
    return Response(p.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
