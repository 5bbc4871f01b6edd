"""The routes of rewarders (what they give, agree with, spend) and of people who rate: a queue, and the way back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel

from ...core.config.root import Config
from ...core.errors import Forbidden
from ...proxy.api.bodies import Limit, PathId
from ...proxy.api.requests import ControlRequest, Parts, UserRoute
from .config import JudgeConfig, RewarderConfig
from .kinds import made
from .rewarder import Away
from .table import ENOUGH, Checked, KeptAnswers, Order, PeopleTable, labels, last_check, spent_by_each, wait_for

router = APIRouter(tags=["rewards"], route_class=UserRoute)


class CheckSeen(BaseModel):
    """The last `rewards check`: the share of pairs that it ordered as `labels` labels did, with its 95 % interval."""

    at: float
    labels: int
    alike: float
    low: float
    high: float


class RewarderSeen(BaseModel):
    """One that gives rewards of this name. `called`: its name in commands; `weight`: what its rewards count for.

    `waiting`: rollouts that it has not spoken about. `check`: null if nobody checked it as it is now. `warning`: why
    it should not train yet. `away`: why it cannot say who it is.
    """

    name: str
    called: str
    kind: str
    model: str | None
    weight: float
    tokens: int | None
    usd: float | None
    waiting: int | None
    check: CheckSeen | None
    warning: str | None
    away: str | None


class BudgetSeen(BaseModel):
    """`judge.budget`, and what counts for it."""

    tokens: int | None
    usd: float | None
    spent_tokens: int
    spent_usd: float


class LabelsSeen(BaseModel):
    """Of the newest 5,000 rollouts, those that people have labelled (`human`), and how many people did."""

    rollouts: int
    people: int


class RewardersSeen(BaseModel):
    """`weights`: what rewards count for in training, by name. A key that sees only its own rollouts gets no numbers."""

    data: list[RewarderSeen]
    weights: dict[str, float]
    budget: BudgetSeen | None
    labels: LabelsSeen | None


@router.get("/rewarders", response_model=RewardersSeen)
async def get_rewarders(request: ControlRequest) -> dict[str, Any]:
    """What gives rewards by itself, whether people agree with it, what it has spent, and what waits for it."""
    p, own = request.parts, request.caller.own
    keys = p.config.section(JudgeConfig)
    spent = [] if own else await spent_by_each(p.store.database)
    of = {one["name"]: one for one in spent}
    budget = {"spent_tokens": sum(one["tokens"] for one in spent), "spent_usd": sum(one["usd"] for one in spent)}
    return {
        "data": [
            await _seen(p, name, one, of.get(name, {}), own=own) for name, one in keys.rewarders(p.config.rewards)
        ],
        "weights": p.config.trainer.training_weights,
        "budget": None if own else {"tokens": keys.budget.tokens, "usd": keys.budget.usd} | budget,
        "labels": None if own else await labels(p.store.database),
    }


async def _seen(p: Parts, name: str, one: RewarderConfig, spent: dict[str, Any], *, own: bool) -> dict[str, Any]:
    weight, who = p.config.trainer.training_weights.get(name, 0.0), called(p.config, name, one)
    view: dict[str, Any] = {
        "name": name,
        "called": who,
        "kind": one.kind,
        "model": p.config.section(JudgeConfig).calls.model if one.kind == "judge" else one.model,
        "weight": weight,
        "tokens": None if own else spent.get("tokens", 0),
        "usd": None if own else spent.get("usd", 0.0),
        "waiting": None if own else await wait_for(p.store.database, name),
        "check": None,
        "warning": None,
        "away": None,
    }
    if own or not one.judges:
        return view
    try:
        check = await last_check(p.store.database, await source(p.config, name, one))
    except Away as error:
        return view | {"away": str(error)}
    about = None if check is None else {part: getattr(check, part) for part in CheckSeen.model_fields}
    return view | {"check": about, "warning": warning(who, check) if weight else None}


def called(config: Config, name: str, one: RewarderConfig) -> str:
    """Return what commands call a rewarder: its kind, or its name where there are several of the kind."""
    kinds = [other.kind for _, other in config.section(JudgeConfig).rewarders(config.rewards)]
    return one.kind if kinds.count(one.kind) == 1 else name


async def source(config: Config, name: str, one: RewarderConfig) -> str:
    """Return the `source` that a rewarder's checks are kept by."""
    return await made(name, one, config, KeptAnswers(name, one, config.section(JudgeConfig).budget)).source()


def warning(kind: str, check: Checked | None) -> str | None:
    """Return what to know of a rewarder that trains; None if it was found to agree with people."""
    if check is None or check.labels < ENOUGH:
        why = "nobody checked it" if check is None else f"was checked with {check.labels} labels"
        return (
            f"{kind} trains, and {why}: label {ENOUGH} rollouts (`lightning-proxy rollouts rate`),"
            f" then run `lightning-proxy rewards check {kind}`"
        )
    if check.low <= 0.5:
        return (
            f"{kind} trains, and its order may be chance: {check.alike:.2f} of pairs are as labels say"
            f" (`lightning-proxy rewards try {kind} ID` shows what it gives)"
        )
    return None


class Unrated(BaseModel):
    rollout_id: str
    task_id: str | None
    reward: float | None


class UnratedList(BaseModel):
    data: list[Unrated]


@router.get("/people/queue", response_model=UnratedList)
async def get_queue(
    request: ControlRequest,
    person: Annotated[str, Query(min_length=1, max_length=200)],
    order: Order = "newest",
    limit: Limit = 50,
) -> Any:
    """Ended rollouts that this person (a `source`) has not rated; `uncertain`: first those with a middling reward."""
    database = request.parts.store.database
    rows = await PeopleTable(database).queue(person, order, limit, request.caller.sees)
    return {"data": [dict(row) for row in rows]}


@router.delete("/rollouts/{rollout_id}/rewards/{reward_id}", status_code=204)
async def take_back_reward(
    request: ControlRequest, rollout_id: PathId, reward_id: Annotated[int, Path(ge=0, lt=2**63)]
) -> None:
    """Take back a reward named `human` that was posted with the same key, or any as an admin.

    All of `proxy.api_keys` count as one key.
    """
    p, caller = request.parts, request.caller
    if caller.rollout is not None:
        raise Forbidden("a rollout's own key takes back no reward")
    table = PeopleTable(p.store.database)
    await table.take_back(rollout_id, reward_id, caller.key_id, of_any=caller.is_admin)
