"""Plugs the rewarders in, for whose rewards completed rollouts wait; their routes, and those of people who rate."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel

from ...core.config.root import Config
from ...core.errors import ConfigError, Forbidden
from ...proxy.api.bodies import Limit, PathId
from ...proxy.api.policy import Policy
from ...proxy.api.requests import ControlRequest, UserRoute
from ...proxy.api.status import Status
from ...proxy.hooks import Core, Fields, Hooks, ProxyPlugin
from ...store.database import Database
from ...store.store import Store
from .config import JudgeConfig, RewarderConfig
from .kinds import check, made
from .rewarder import Away
from .scoring import Scorer
from .table import CHECK, ENOUGH, LABELS, WAIT_FOR, Checked, Order, spent_by_each, take_back, unrated

log = logging.getLogger(__name__)
router = APIRouter(tags=["rewards"], route_class=UserRoute)


class RewarderSeen(BaseModel):
    """One that gives rewards of this name. `called`: its name in commands; `weight`: what its rewards count for.

    `waiting`: rollouts that it has not spoken about. `check`: the last `rewards check` of it as it is now: the share of
    pairs that it ordered as `labels` labels did, with its 95 % interval; null if nobody checked it. `warning`: why it
    should not train yet. `away`: why it cannot say who it is.
    """

    name: str
    called: str
    kind: str
    model: str | None
    weight: float
    tokens: int | None = None
    usd: float | None = None
    waiting: int | None = None
    check: Checked | None = None
    warning: str | None = None
    away: str | None = None


class RewardersSeen(BaseModel):
    """A key that sees only its own rollouts gets no numbers.

    `weights`: what rewards count for in training, by name. `budget`: `judge.budget` and what was spent of it.
    `labels`: of the newest 5,000 rollouts, those that people have labelled (`human`), and how many people did.
    """

    data: list[RewarderSeen]
    weights: dict[str, float]
    budget: dict[str, float | None] | None
    labels: dict[str, int] | None


@router.get("/rewarders", response_model=RewardersSeen)
async def get_rewarders(request: ControlRequest) -> dict[str, Any]:
    """What gives rewards by itself, whether people agree with it, what it has spent, and what waits for it."""
    config, database = request.parts.config, request.parts.store.database
    found, budget, labels = await rewarders_seen(config, database), None, None
    if request.caller.own:
        found = [view.model_copy(update={"check": None, "warning": None, "away": None}) for view in found]
    else:
        spent = {row["name"]: row for row in await spent_by_each(database)}
        for view in found:
            used = spent.get(view.name, {"tokens": 0, "usd": 0.0})
            view.tokens, view.usd = used["tokens"], used["usd"]
            view.waiting = await database.value(int, WAIT_FOR, rewarder=view.name)
        budget = config.section(JudgeConfig).budget.model_dump() | {
            f"spent_{name}": sum(row[name] for row in spent.values()) for name in ("tokens", "usd")
        }
        labels = dict(await database.one(LABELS) or {})
    return {"data": found, "weights": config.trainer.training_weights, "budget": budget, "labels": labels}


async def rewarders_seen(config: Config, database: Database) -> list[RewarderSeen]:
    """Return what gives rewards, with its last check."""
    rewarders = config.section(JudgeConfig).rewarders(config.rewards)
    return [
        await _seen(config, database, name, entry, [other.kind for _, other in rewarders]) for name, entry in rewarders
    ]


async def _seen(config: Config, database: Database, name: str, entry: RewarderConfig, kinds: list[str]) -> RewarderSeen:
    called = entry.kind if kinds.count(entry.kind) == 1 else name
    weight = config.trainer.training_weights.get(name, 0.0)
    view = RewarderSeen(name=name, called=called, kind=entry.kind, model=entry.model, weight=weight)
    if entry.judges:
        try:
            view.check = await database.record(Checked, CHECK, source=await made(name, entry, config).source())
            view.warning = warning(called, view.check) if weight else None
        except (Away, ConfigError) as error:
            view.away = str(error)
    return view


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
            f" (`lightning-proxy rescore --rewarder {kind} --dry-run ID` shows what it gives)"
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
    rows = await unrated(request.parts.store.database, person, order, limit, request.caller.sees)
    return {"data": [dict(row) for row in rows]}


@router.delete("/rollouts/{rollout_id}/rewards/{reward_id}", status_code=204)
async def take_back_reward(
    request: ControlRequest, rollout_id: PathId, reward_id: Annotated[int, Path(ge=0, lt=2**63)]
) -> None:
    """Take back a reward named `human` that was posted with the same key, or any as an admin.

    All of `proxy.api_keys` count as one key.
    """
    caller = request.caller
    if caller.rollout is not None:
        raise Forbidden("a rollout's own key takes back no reward")
    database = request.parts.store.database
    await take_back(database, rollout_id, reward_id, caller.key_id, of_any=caller.is_admin)


class PolicyWarnings(BaseModel):
    """`warnings`: what to know of rewarders that train, and that nobody has found to agree with people."""

    warnings: list[str]


class Spent(BaseModel):
    name: str
    tokens: int
    usd: float


class StatusSpent(BaseModel):
    """`spent`: what the models of each rewarder have used and cost so far."""

    spent: list[Spent]


class RewardersPlugin(ProxyPlugin):
    """Asks `rewards.function` and `judge.use` about completed rollouts."""

    routers = (router,)
    fields = ((Policy, PolicyWarnings), (Status, StatusSpent))

    async def check(self) -> None:
        await check(self.config)

    @asynccontextmanager
    async def opened(self, core: Core) -> AsyncIterator[Hooks]:
        config, rewarders = self.config, []
        for name, entry in config.section(JudgeConfig).rewarders(config.rewards):
            rewarders.append(made(name, entry, config, core.store.database))
            if entry.model is not None:
                where = urlsplit(entry.address).hostname
                log.info("judge.use: %s: %s at %s reads rollouts", entry.kind, entry.model, where)
        first = rewarders[0].label if rewarders else None
        await core.store.rollouts.use_function(config.rewards.function or first)
        if rewarders:
            yield Hooks(work=(Scorer(config, core.store, rewarders, core.metrics.rewards.inc).run,))
        else:
            yield Hooks()

    async def status_fields(self, store: Store, key_id: str | None) -> Fields:
        return {"spent": [] if key_id is not None else await spent_by_each(store.database)}

    async def policy_fields(self, store: Store, key_id: str | None) -> Fields:
        found = await rewarders_seen(self.config, store.database)
        return {"warnings": [view.warning for view in found if view.warning]}


plugin = RewardersPlugin
