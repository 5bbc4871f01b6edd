"""`/rollouts` serves rollouts and takes their events, `/reward` takes rewards, and `/tasks` lists tasks and rewards."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from ...core.errors import Forbidden, TooLarge, Unprocessable
from ...core.http import in_thread_if_large
from ...core.json_text import dumps, fields_of
from ...core.records import Event, Mode, Reward, Rollout, RolloutName, RolloutStatus, Transition
from ...core.statistics import mean_and_spread
from ...store.database import Row, read
from ...store.keys import hash_key, new_key
from ...store.reports import ComparedRollout, Summary
from ..gateway.relay import DataPath, name_rollout
from ..hooks import ProxyPlugin
from .bodies import (
    INTEGER,
    Body,
    Count,
    Cursor,
    Finite,
    Id,
    Integer,
    Limit,
    Listed,
    Name,
    Page,
    PathId,
)
from .requests import AdminRoute, AgentRoute, ControlRequest, OwnKey, Parts, UserRoute
from .views import Call, rollout_detail, transitions, words_in

Requests = Literal["short", "whole"]
SHOWN = 32  # rewards of a task
Comment = Annotated[str | None, Field(max_length=10_000)]
Flag = Annotated[bool, Field(strict=True)]

rewards = APIRouter(tags=["rewards"], route_class=AgentRoute)
tasks = APIRouter(tags=["tasks"], route_class=UserRoute)
router = APIRouter(prefix="/rollouts", tags=["rollouts"], route_class=UserRoute)
admins = APIRouter(prefix="/rollouts", tags=["rollouts"], route_class=AdminRoute)


class RolloutsBody(Body, extra="allow", json_schema_extra={"additionalProperties": False}):
    """Opens `n` sibling rollouts of one task. With `n: 0`, only checks that the version or model is available.

    `policy_version` or `model`: what answers for the policy's alias instead of the live version. `may_reward: false`:
    the rollouts' keys may only call the model. `sibling_of`: a rollout whose task and group the new ones join, for
    example a failed one that is tried again.
    """

    task_id: Id | None = None
    mode: Literal["train", "eval"] = "train"
    metadata: dict[str, Any] = Field({})
    n: Annotated[int, Field(strict=True, ge=0, le=1000), INTEGER] = 1
    may_reward: Flag = True
    sibling_of: Id | None = None
    policy_version: Integer | None = None
    model: Name | None = None


@dataclass
class Opened:
    rollout_id: str
    base_url: str
    api_key: str


@router.post("")
async def open_rollouts(request: ControlRequest, body: RolloutsBody) -> list[Opened]:
    """Open n sibling rollouts, each with its own base URL and key."""
    p, caller = request.parts, request.caller
    added = _added(p.plugins, body)
    if body.sibling_of is not None:
        await p.keys.require(caller, [body.sibling_of])
        task_id = (await p.store.rollouts.get(body.sibling_of)).task_id
        if body.task_id not in (None, task_id):
            why = f"sibling_of names a rollout of task {task_id!r}, but task_id is {body.task_id!r}"
            raise Unprocessable(why, param="sibling_of")
        body.task_id = task_id
    await p.router.require(body.policy_version, body.model)
    for plugin, fields in added:
        await plugin.check_rollouts(p.store, fields)
    metadata = await in_thread_if_large(len(await request.body()), partial(_metadata, p, body))
    keys = {uuid4().hex: new_key("rollout") for _ in range(body.n)}
    one = RolloutName("", body.task_id, mode=body.mode, key_id=caller.key_id, evidence=caller.evidence)
    hashed = [(one._replace(rollout_id=name), hash_key(key)) for name, key in keys.items()]
    await p.store.rollouts.open(
        hashed, metadata, policy_version=body.policy_version, model=body.model, may_reward=body.may_reward,
        sibling_of=body.sibling_of,
    )  # fmt: skip
    for plugin, fields in added:
        await plugin.rollouts_opened(p.store, [*keys], fields)
    root, scheme = request.base_url, request.headers.get("x-forwarded-proto")
    root = root.replace(scheme=scheme) if scheme in ("http", "https") else root
    return [Opened(name, f"{root}rollouts/{name}/v1", key) for name, key in keys.items()]


def _added(plugins: Sequence[ProxyPlugin], body: RolloutsBody) -> list[tuple[ProxyPlugin, BaseModel]]:
    """The plugins' fields in the body, checked. Raises RequestValidationError if a field is invalid or unknown."""
    given, found = dict(body.model_extra or {}), list[tuple[ProxyPlugin, BaseModel]]()
    try:
        for plugin in plugins:
            if (model := dict(plugin.fields).get(RolloutsBody)) is not None:
                own = {name: given.pop(name) for name in model.model_fields if name in given}
                found.append((plugin, model.model_validate(own)))
        Body.model_validate(given)  # refuses unknown fields
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    return found


def _metadata(p: Parts, body: RolloutsBody) -> Any:
    """The redacted metadata of each rollout. Raises TooLarge if all copies together exceed the limit of a request."""
    metadata, most = p.redactor.value(body.metadata, "metadata"), p.bodies.limit
    if body.n * len(dumps(metadata)) > most:
        raise TooLarge(f"metadata: {body.n} copies take more than {most} bytes (proxy.max_body_mb)", param="metadata")
    return metadata


@dataclass(frozen=True, kw_only=True)
class ListedRollout(Rollout, Summary):
    """A listed rollout. `words=true` adds its model, key and latency, and the first words of its question and answer.

    `awaits_reward`: as in `GET /rollouts/{id}`. `last_call`, with `words=true`: the status of its last call.
    """

    awaits_reward: bool


class RolloutQuery(BaseModel):
    status: RolloutStatus | None = None
    task_id: Id | None = None
    agent: Id | None = None
    mode: Mode | None = None
    min_reward: Finite | None = None
    max_reward: Finite | None = None
    since: Finite | None = None
    text: Name | None = None
    prefix: Id | None = None
    version: Count | None = None
    step: Count | None = None
    key: Name | None = None
    model: Name | None = None
    words: bool = False
    limit: Limit = 100
    cursor: Cursor = None


@router.get("", response_model=Page[ListedRollout])
async def list_rollouts(request: ControlRequest, query: Annotated[RolloutQuery, Query()]) -> dict[str, Any]:
    """Rollouts, newest first, a page at a time.

    `since` is a Unix time, `text` is searched for in requests and answers, `key` is a key's name, and `prefix` is how a
    rollout's id begins. With filters other than `prefix`, status, task, agent and mode, one request searches only some
    rollouts, so a page may be short: follow `next_cursor`. `words` adds first words, model, key and latency.
    """
    store, sees = request.parts.store, request.caller.sees
    filters = query.model_dump(exclude={"words", "limit", "cursor"}, exclude_none=True)
    page, following = await store.rollouts.page(filters | _only(sees), query.limit, query.cursor)
    names = [one.rollout_id for one in page]
    awaiting = await store.rollouts.awaiting(names)
    data = [fields_of(one) | {"awaits_reward": one.rollout_id in awaiting} for one in page]
    if query.words:
        found = await store.reports.summaries(names, words_in)
        data = [one | fields_of(found.get(one["rollout_id"], Summary())) for one in data]
    return {"data": data, "next_cursor": None if following is None else str(following)}


def _only(key_id: str | None) -> dict[str, str]:
    """The filter for the rollouts that a caller may see."""
    return {} if key_id is None else {"key_id": key_id}


class RolloutDetail(BaseModel):
    """A rollout's fields, with its calls in order (`calls`) and their number (`call_count`).

    `events`: what the agent posted between calls, each with the `seq` of the next call. `awaits_reward`:
    `rewards.function` or another rewarder has not scored the rollout yet.
    """

    rollout_id: str
    status: RolloutStatus
    call_count: int
    calls: list[Call]
    events: list[Event]
    rewards: list[Reward]
    awaits_reward: bool


@router.get("/{rollout_id}", response_model=RolloutDetail)
async def get_rollout(request: ControlRequest, rollout_id: PathId, requests: Requests = "short") -> dict[str, Any]:
    """A rollout with its calls in order and its rewards.

    Each call has only what its request and prompt add to those of earlier calls, named in `request_of` and `prompt_of`.
    With `requests=whole` each call has both in full; the answer for a long rollout is then large.
    """
    store = request.parts.store
    # Read before the rewards: a client that sees that none is awaited any more must see the reward.
    also: dict[str, Any] = {"awaits_reward": bool(await store.rollouts.awaiting([rollout_id]))}
    rollout = await store.rollouts.get(rollout_id)
    calls = await store.calls.of(rollout_id, short=requests == "short")
    rewards, events = await store.rewards.of(rollout_id), await store.events.of(rollout_id)
    for plugin in request.parts.plugins:
        also |= await plugin.rollout_fields(store, rollout_id)
    return await asyncio.to_thread(rollout_detail, rollout, calls, rewards, events) | also


@router.get("/{rollout_id}/transitions", response_model=Listed[Transition])
async def get_transitions(request: ControlRequest, rollout_id: PathId, requests: Requests = "short") -> dict[str, Any]:
    """The rollout as transitions of a Markov decision process.

    The state of a model call has only what it adds to an earlier state, as in `GET /rollouts/{id}`. With
    `requests=whole` each state is complete.
    """
    store = request.parts.store
    rollout = await store.rollouts.get(rollout_id)
    calls = await store.calls.of(rollout_id, short=requests == "short")
    events = await store.events.of(rollout_id)
    return {"data": await asyncio.to_thread(transitions, rollout, calls, events)}


class CreditedCall(BaseModel):
    """How the rollout's newest step trained on a call. The fields from `step` on are null if no step assigned credit.

    `row`: the index of its training row in the rollout. `placed`: `first` in its rollout, `merged` into a row, or
    why it opened a new row: `drift`, `edited`, `repeated`, `adjoining` or `new`; otherwise why it is in no row.
    """

    call_id: str
    seq: int
    agent: str | None
    step: int | None
    returned: float | None = Field(alias="return")
    advantage: float | None
    row: int | None
    placed: str | None


_CREDIT = [field.alias or name for name, field in CreditedCall.model_fields.items()]


class TrainingRow(BaseModel):
    row: int
    call_ids: list[str]
    tokens: int
    trained_tokens: int


class TrainingRows(BaseModel):
    """`group`: this rollout and its siblings, compared with it or not (at most 256, oldest first)."""

    rollout_id: str
    task_id: str | None
    step: int | None
    dropped: str | None
    group: list[ComparedRollout]
    calls: list[CreditedCall]
    rows: list[TrainingRow]


@router.get("/{rollout_id}/rows", response_model=TrainingRows)
async def get_rows(request: ControlRequest, rollout_id: PathId) -> dict[str, Any]:
    """How the rollout was trained on: its siblings, its rows, and the credit for each call.

    Siblings that the caller may not see are left out. Fine-tuning assigns no credit.
    """
    store, caller = request.parts.store, request.caller
    rollout, calls = await store.rollouts.get(rollout_id), await store.credit.of(rollout_id)
    rows = defaultdict[int, list[Row]](list)
    for call in calls:
        if call["row"] is not None:
            rows[call["row"]].append(call)
    return {
        "rollout_id": rollout_id,
        "task_id": rollout.task_id,
        "step": rollout.step,
        "dropped": rollout.dropped,
        "group": await store.credit.group_of(rollout_id, caller.sees, siblings=caller.rollout is None),
        "calls": [{name: call[name] for name in _CREDIT} for call in calls],
        "rows": [
            # The prompt of its last call and that call's answer, in which the answers of its calls lie.
            {"row": row, "call_ids": [call["call_id"] for call in of], "tokens": of[-1]["prompt"] + of[-1]["answer"]}
            | {"trained_tokens": sum(call["answer"] for call in of)}
            for row, of in sorted(rows.items())
        ],
    }


class ValueBody(Body):
    """A state, in which the agent takes the actions that follow, or a note, which is not part of transitions."""

    kind: Literal["state", "note"]
    agent: Id | None = None
    name: Name | None = None
    value: Any


class ActionBody(Body):
    """An action that the agent took without a model, and its result."""

    kind: Literal["action"]
    agent: Id | None = None
    name: Name
    arguments: Any = None
    result: Any = None
    is_error: Flag = False


EventBody = Annotated[ValueBody | ActionBody, Field(discriminator="kind")]


EventList = Annotated[list[EventBody], Field(max_length=1000)]


class EventRecorded(BaseModel):
    event_id: int
    rollout_id: str
    status: Literal["recorded"]


@router.post("/{rollout_id}/events", response_model=EventRecorded | list[EventRecorded])
async def post_events(request: ControlRequest, rollout_id: PathId, body: EventBody | EventList, key: OwnKey) -> Any:
    """Record what an agent did or saw between its calls: one event, or a list (all or none).

    An unknown rollout is opened, even by an empty list. Its task, agent and mode come from the request's headers, as
    for a call.
    """
    p, sent = request.parts, await request.body()
    headers = {name: value for name, value in request.headers.items() if name != "x-rollout-id"}
    name = request.caller.admit(name_rollout(DataPath("", rollout_id), headers))
    bodies = body if isinstance(body, list) else [body]
    events = await in_thread_if_large(len(sent), lambda: [p.redactor.event(Event(**dict(b))) for b in bodies])
    answer = await p.store.events.post(name, events, key, sent)
    return answer if isinstance(body, list) else answer[0]


class EndBody(Body):
    status: Literal["completed", "failed", "discarded"]
    reason: Comment = None


@router.post("/{rollout_id}/end")
async def end_rollout(request: ControlRequest, rollout_id: PathId, body: EndBody) -> Rollout:
    """End a rollout without posting a reward."""
    p, reason = request.parts, body.reason
    redacted = reason and p.redactor.text(reason)
    return await p.store.rollouts.end(rollout_id, body.status, redacted, request.caller.sender)


@admins.delete("/{rollout_id}", status_code=204)
async def delete_rollout(request: ControlRequest, rollout_id: PathId) -> None:
    """Permanently delete an ended rollout with its calls, tokens and rewards."""
    await request.parts.store.rollouts.delete(rollout_id)
    request.parts.forget(rollout_id, "request")
    request.caller.log_change(f"rollout {rollout_id} was deleted")


MOST_REWARDS = 10_000  # in one list


class RewardBody(Body):
    """One reward. `final` defaults to true without `call_id`, to false with it."""

    rollout_id: Id
    reward: Annotated[Finite, Field(strict=True)]
    call_id: Id | None = None
    name: Name = "reward"
    source: Annotated[str, Field(max_length=200)] | None = None
    comment: Comment = None
    final: Flag | None = None
    retrain: Flag = False


def _not_too_many(rewards: Any) -> Any:
    """Refuse a list that is too long before any of its rewards is checked."""
    if isinstance(rewards, list) and len(rewards) > MOST_REWARDS:
        raise TooLarge(f"the list has {len(rewards)} rewards; post at most {MOST_REWARDS} at once")
    return rewards


RewardList = Annotated[list[RewardBody], BeforeValidator(_not_too_many)]


class Rewarded(BaseModel):
    reward_id: int
    rollout_id: str
    status: Literal["recorded"]


@rewards.post("/reward", response_model=Rewarded | list[Rewarded])
async def post_reward(request: ControlRequest, body: RewardBody | RewardList, key: OwnKey) -> Any:
    """Record one reward, or a list of them (all or none)."""
    bodies = body if isinstance(body, list) else [body]
    p, caller, sent = request.parts, request.caller, await request.body()
    await p.keys.require(caller, (one.rollout_id for one in bodies))
    if caller.rollout is not None and any(one.retrain for one in bodies):
        raise Forbidden("a rollout's own key cannot offer rollouts to the trainer again (retrain)")

    def checked() -> list[Reward]:
        rewards = []
        for place, one in enumerate(bodies):
            p.config.rewards.require(one.reward, f"{place}.reward" if isinstance(body, list) else "reward")
            source, comment = (text and p.redactor.text(text) for text in (one.source, one.comment))
            final = one.call_id is None if one.final is None else one.final
            rewards.append(Reward(
                one.rollout_id, one.reward, one.call_id, one.name, source, comment, final, one.retrain
            ))  # fmt: skip
        return rewards

    answer = await p.store.rewards.post(await in_thread_if_large(len(sent), checked), key, sent, caller.sender)
    p.metrics.rewards.inc(len(answer))
    if caller.is_admin:
        for rollout_id in await p.store.rewards.changed([one["reward_id"] for one in answer]):
            caller.log_change(f"the reward of rollout {rollout_id} was changed")
    return answer if isinstance(body, list) else answer[0]


@dataclass
class TaskReward:
    rollout_id: str
    reward: float
    at: float
    mode: Mode
    policy_version: int | None


Solved = Literal["never", "always", "sometimes"]


@dataclass
class TaskSeen:
    """A task among the newest rollouts. `mean` to `max` are over the rewards of its rollouts.

    `rewarded`: how many have a reward. `solved`: `never` if each reward is the lowest that any task got, `always` if
    each is the highest; null if unknown. `recent`: the newest 32 rewarded rollouts, oldest first; `at` is Unix time.
    """

    task_id: str
    rollouts: int
    rewarded: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    solved: Solved | None
    last_at: float
    recent: list[TaskReward]


class TaskPage(Page[TaskSeen]):
    """`of_newest`: how many of the newest rollouts were read."""

    of_newest: int


@tasks.get("/tasks", response_model=TaskPage)
async def list_tasks(
    request: ControlRequest,
    mode: Mode | None = None,
    task_id: Id | None = None,
    sort: Literal["recent", "mean", "spread", "rollouts"] = "recent",
    limit: Limit = 100,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """The tasks of the newest 20,000 rollouts, a page at a time.

    `sort`: by newest rollout, mean reward, standard deviation of the rewards, or number of rollouts; descending.
    The cursor is a position in this order, so new rollouts may move a task from one page to another.
    """
    reports, first = request.parts.store.reports, cursor or 0
    filters: dict[str, Any] = _only(request.caller.sees) | ({} if mode is None else {"mode": mode})
    compared = await reports.newest_rollouts(filters)
    looked_at = compared if task_id is None else await reports.newest_rollouts(filters | {"task_id": task_id})
    found = await asyncio.to_thread(tasks_seen, looked_at, compared)
    # Of equals, and of tasks without a reward, which come last, the one with the newest rollout is first.
    if by := {"mean": "mean", "spread": "std", "rollouts": "rollouts"}.get(sort):
        found.sort(key=lambda task: float("inf") if getattr(task, by) is None else -getattr(task, by))
    following = str(first + limit) if first + limit < len(found) else None
    return {"data": found[first : first + limit], "next_cursor": following, "of_newest": len(looked_at)}


def tasks_seen(newest: Iterable[Row], compared: Iterable[Row]) -> list[TaskSeen]:
    """Return the tasks of rollouts, ordered by newest rollout. The rollouts must be sorted, newest first.

    A task is `never` solved if all its rewards are the lowest in `compared`, and `always` solved if all are the
    highest. If all rewards in `compared` are equal, `solved` is unknown.
    """
    known = [row["reward"] for row in compared if row["task_id"] is not None and row["reward"] is not None]
    lowest, highest = min(known, default=0.0), max(known, default=0.0)
    of_task = defaultdict[str, list[Row]](list)
    for row in newest:
        if row["task_id"] is not None:
            of_task[row["task_id"]].append(row)
    seen = []
    for task_id, rows in of_task.items():
        rewarded = [read(TaskReward, row) for row in rows if row["reward"] is not None]
        rewards = [one.reward for one in rewarded]
        mean, spread = mean_and_spread(rewards) if rewards else (None, None)
        low, high = min(rewards, default=None), max(rewards, default=None)
        solved: Solved | None = None
        if rewards and lowest < highest:
            solved = "never" if high == lowest else "always" if low == highest else "sometimes"
        last_at, recent = max(row["at"] for row in rows), rewarded[:SHOWN][::-1]
        seen.append(TaskSeen(task_id, len(rows), len(rewards), mean, spread, low, high, solved, last_at, recent))
    return seen
