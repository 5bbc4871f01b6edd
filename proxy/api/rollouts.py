"""`/rollouts`: opening, reading, ending and deleting them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from ...core.errors import TooLarge, Unprocessable
from ...core.http import in_thread_if_large
from ...core.json_text import dumps
from ...core.records import Event, Rollout, RolloutName, check_id
from ...store.keys import hash_key, new_key
from ...store.reports import Summary
from ...store.rollouts import RolloutSearch
from ..gateway.relay import DataPath, name_rollout
from ..hooks import ProxyPlugin
from .answers import ERRORS, EventRecorded, Opened, RolloutDetail, RolloutPage, Transitions, answers
from .bodies import Body, Count, Cursor, EndBody, EventBody, EventList, Finite, Id, Named, PathId, RolloutsBody
from .requests import (
    AdminRoute,
    AgentRoute,
    Limit,
    Parts,
    caller_of,
    large_response,
    own_key,
    parts,
    parts_for,
    parts_for_all,
    position_of,
    redacted_text,
)
from .training_rows import TrainingRows, rows_of
from .views import credit_view, record_view, rollout_detail, transitions, words_in, words_view

Requests = Literal["short", "whole"]

router = APIRouter(prefix="/rollouts", tags=["rollouts"], responses=ERRORS, route_class=AgentRoute)
admins = APIRouter(route_class=AdminRoute)


@router.post("", response_model=None, responses=answers(list[Opened]))
async def open_rollouts(request: Request, body: RolloutsBody) -> list[dict[str, str]]:
    """Open n sibling rollouts, each with a base URL and a key of its own."""
    added = _added(parts(request).plugins, body)
    p = await parts_for_all(request)
    task_id = await _task_of(p, request, body)
    names = [RolloutName(uuid4().hex, task_id, None, body.mode) for _ in range(body.n)]
    keys = [new_key("rollout") for _ in names]
    hashed = [(n, hash_key(key)) for n, key in zip(names, keys, strict=True)]
    await p.model_check.require(body.policy_version, body.model)
    for plugin, fields in added:
        await plugin.check_rollouts(p.store, fields)
    metadata = await in_thread_if_large(len(await request.body()), partial(_metadata, p, body))
    chosen: dict[str, Any] = {"policy_version": body.policy_version, "model": body.model}
    caller = caller_of(request)
    chosen |= {"may_reward": body.may_reward, "evidence": caller.evidence, "sibling_of": body.sibling_of}
    await p.store.rollouts.open(hashed, metadata, caller.key_id, **chosen)
    for plugin, fields in added:
        await plugin.rollouts_opened(p.store, [n.rollout_id for n in names], fields)
    root = str(request.base_url).rstrip("/")
    return [
        {"rollout_id": n.rollout_id, "base_url": f"{root}/rollouts/{n.rollout_id}/v1", "api_key": key}
        for n, key in zip(names, keys, strict=True)
    ]


def _added(plugins: Sequence[ProxyPlugin], body: RolloutsBody) -> list[tuple[ProxyPlugin, BaseModel]]:
    """The fields of each plugin that adds some, checked by its model. Raise RequestValidationError."""
    given, found = dict(body.model_extra or {}), list[tuple[ProxyPlugin, BaseModel]]()
    try:
        for plugin in plugins:
            if (model := dict(plugin.fields).get(RolloutsBody)) is not None:
                own = {name: given.pop(name) for name in model.model_fields if name in given}
                found.append((plugin, model.model_validate(own)))
        Body.model_validate(given)  # refuses what is nobody's
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    return found


async def _task_of(p: Parts, request: Request, body: RolloutsBody) -> str | None:
    """The task of rollouts that are to be opened: that of the sibling they are given, if any."""
    if body.sibling_of is None:
        return body.task_id
    await p.keys.require(caller_of(request), [body.sibling_of])
    task_id = (await p.store.rollouts.get(body.sibling_of)).task_id
    if body.task_id not in (None, task_id):
        raise Unprocessable(f"sibling_of: its task is {task_id!r}, not {body.task_id!r}", param="sibling_of")
    return task_id


def _metadata(p: Parts, body: RolloutsBody) -> Any:
    """The metadata of every rollout, redacted. Raise TooLarge where all copies are larger than a request may be."""
    metadata, most = p.redactor.value(body.metadata, "metadata"), p.bodies.limit
    if body.n * len(dumps(metadata)) > most:
        raise TooLarge(f"metadata: {body.n} copies are larger than {most} bytes (proxy.max_body_mb)", param="metadata")
    return metadata


@router.get("", response_model=None, responses=answers(RolloutPage))
async def list_rollouts(
    request: Request,
    status: Literal["running", "completed", "failed", "discarded"] | None = None,
    task_id: Id | None = None,
    agent: Id | None = None,
    mode: Literal["train", "eval"] | None = None,
    min_reward: Finite | None = None,
    max_reward: Finite | None = None,
    since: Finite | None = None,
    text: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    prefix: Id | None = None,
    version: Count | None = None,
    step: Count | None = None,
    key: Named | None = None,
    model: Named | None = None,
    words: bool = False,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Rollouts, newest first, a page at a time.

    `since` is Unix time, `text` is looked for in requests and answers, `prefix` is the beginning of an id, `key` a
    key's name. With one of these, or with a reward, version, step or model, a bounded number is looked at: a page may
    be short; follow `next_cursor` for more. With `words`, each has its first words, model, key and latency.
    """
    p, sight, position = await parts_for_all(request), caller_of(request).sight, position_of(cursor)
    wanted = {"status": status, "task_id": task_id, "agent": agent, "mode": mode}
    wanted |= {"key_id": sight.key_id}
    filters = {name: value for name, value in wanted.items() if value is not None}
    sought = RolloutSearch(min_reward, max_reward, since, text, prefix, version, step, key, model)
    if sought == RolloutSearch():
        page, following = await p.store.rollouts.page(filters, limit, position)
    else:
        page, following = await p.store.rollouts.search(filters, sought, limit, position)
    following_cursor = None if following is None else str(following)
    names = [one.rollout_id for one in page]
    awaiting = await p.store.endings.await_still(names)
    found = await p.store.summaries.of(names, words_in) if words else None
    return await large_response(lambda: {"data": [*_listed(page, awaiting, found)], "next_cursor": following_cursor})


def _listed(page: list[Rollout], awaiting: set[str], found: dict[str, Summary] | None) -> Iterator[dict[str, Any]]:
    """Each rollout of a page, with its words if they were asked for."""
    for one in page:
        words = {} if found is None else words_view(found.get(one.rollout_id))
        yield record_view(one) | {"awaits_reward": one.rollout_id in awaiting} | words


@router.get("/{rollout_id}", response_model=None, responses=answers(RolloutDetail))
async def get_rollout(request: Request, rollout_id: PathId, requests: Requests = "short") -> Response:
    """A rollout with its calls in order and its rewards.

    A call has what its request and prompt add to those of an earlier call: `request_of` and `prompt_of` say to what.
    `requests=whole`: each call has all of both, and a long rollout is large.
    """
    p = await parts_for(request, rollout_id)
    # Before the rewards: who sees that they are awaited no more sees them.
    awaits = bool(await p.store.endings.await_still([rollout_id]))
    rollout = await p.store.rollouts.get(rollout_id)
    calls = await p.store.calls.of(rollout_id, short=requests == "short")
    rewards = await p.store.rewards.of(rollout_id)
    events = await p.store.events.of(rollout_id)
    also: dict[str, Any] = {"awaits_reward": awaits}
    for plugin in p.plugins:
        also |= await plugin.rollout_fields(p.store, rollout_id)
    return await large_response(lambda: rollout_detail(rollout, calls, rewards, events) | also)


@router.get("/{rollout_id}/transitions", response_model=None, responses=answers(Transitions))
async def get_transitions(request: Request, rollout_id: PathId, requests: Requests = "short") -> Response:
    """The rollout as transitions of a Markov decision process.

    A state of a model's call has what it adds to the state of an earlier one, as a call of `GET /rollouts/{id}` has.
    `requests=whole`: each state has all of it.
    """
    p = await parts_for(request, rollout_id)
    rollout = await p.store.rollouts.get(rollout_id)
    calls = await p.store.calls.of(rollout_id, short=requests == "short")
    events = await p.store.events.of(rollout_id)
    return await large_response(lambda: {"data": [*map(record_view, transitions(rollout, calls, events))]})


@router.get("/{rollout_id}/rows", response_model=None, responses=answers(TrainingRows))
async def get_rows(request: Request, rollout_id: PathId) -> Response:
    """How the rollout was trained: credit by call, its siblings and its rows.

    The answer has nothing of siblings that the caller may not see. Supervised fine-tuning assigns no credit.
    """
    p, sight = await parts_for(request, rollout_id), caller_of(request).sight
    rollout = await p.store.rollouts.get(rollout_id)
    credit = p.store.credit
    calls, rows = await credit.of(rollout_id), rows_of(await credit.tokens_of(rollout_id))
    group = await credit.group_of(rollout_id, sight.key_id, siblings=sight.siblings)
    found = {
        "rollout_id": rollout_id,
        "task_id": rollout.task_id,
        "step": rollout.step,
        "dropped": rollout.dropped,
        "group": [*map(record_view, group)],
        "calls": [*map(credit_view, calls)],
        "rows": [row.view() for row in rows],
    }
    return await large_response(lambda: found)


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
    name = caller_of(request).admit(name_rollout(DataPath("", rollout_id), headers))
    bodies, sent = body if isinstance(body, list) else [body], await request.body()
    events = await in_thread_if_large(len(sent), lambda: [p.redactor.event(Event(**dict(b))) for b in bodies])
    answer = await p.store.events.post(name, events, own_key(request, idempotency_key), sent)
    return answer if isinstance(body, list) else answer[0]


@router.post("/{rollout_id}/end", response_model=None, responses=answers(Rollout))
async def end_rollout(request: Request, rollout_id: PathId, body: EndBody) -> Response:
    """End a rollout without a reward."""
    p, by = await parts_for(request, rollout_id), caller_of(request).sender
    ended = await p.store.rollouts.end(rollout_id, body.status, redacted_text(p, body.reason), by)
    return await large_response(partial(record_view, ended))


@admins.delete("/{rollout_id}", status_code=204)
async def delete_rollout(request: Request, rollout_id: PathId) -> None:
    """Delete an ended rollout with its calls, tokens and rewards, for good."""
    p = parts(request)
    await p.store.rollouts.delete(check_id(rollout_id, "rollout_id"))
    p.forget(rollout_id, "request")
    caller_of(request).log_change(f"rollout {rollout_id} was deleted")


router.include_router(admins)
