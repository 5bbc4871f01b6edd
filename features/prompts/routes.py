"""`/prompts`: the texts that stand in for agents' own, their versions, and which one is live."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from ...core.records import check_id
from ...proxy.access.auth import Caller
from ...proxy.api.bodies import INTEGER, Body, Id, Limit, PathId
from ...proxy.api.requests import AdminRoute, AgentRoute, ControlRequest, Parts, UserRoute
from .table import Kept, Prompt, PromptTable, Role, TriedOut

router = APIRouter(tags=["prompts"], route_class=UserRoute)
agents = APIRouter(tags=["prompts"], route_class=AgentRoute)
admins = APIRouter(tags=["prompts"], route_class=AdminRoute)

MOST_CHARACTERS = 1_000_000
Version = Annotated[int, Field(strict=True, ge=1, lt=2**31), INTEGER]


class Match(Body):
    """The message: the first one of this role, of this agent, or of any agent if it has the text of a version."""

    agent: Id | None = None
    role: Role = "system"


class PromptBody(Body):
    """A prompt's text. The first one of a new name is the agent's own, and live.

    `match` is needed only for the first version. `parent`: the version that it was made from. `promote`: make it live.
    """

    name: Id
    text: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
    match: Match | None = None
    parent: Version | None = None
    comment: Annotated[str, Field(max_length=10_000)] | None = None
    metrics: Annotated[dict[str, float | int | str | None], Field(default_factory=dict)]
    promote: Annotated[bool, Field(strict=True)] = False


class PromptVersionBody(Body):
    version: Version


class PromptVersionSeen(BaseModel):
    """One text. `rewards`: by mode, the mean reward of the rollouts that kept it."""

    version: int
    text: str
    live: bool
    created_at: float
    parent: int | None
    comment: str | None
    metrics: dict[str, Any]
    rewards: dict[Literal["train", "eval"], dict[str, float]]


class PromptSeen(BaseModel):
    """`version` and `text`: those of the rollout that asks; without one, or before it keeps any, the live ones."""

    name: str
    match: Match
    live_version: int
    version: int
    text: str
    versions: list[PromptVersionSeen]


class PromptList(BaseModel):
    data: list[PromptSeen]


class TriedOutList(BaseModel):
    data: list[TriedOut]


class KeptList(BaseModel):
    data: list[Kept]


@router.get("/prompts", response_model=PromptList)
async def list_prompts(request: ControlRequest) -> dict[str, Any]:
    """All prompts, by name, with their versions."""
    p, caller = request.parts, request.caller
    views = [await _view(p, prompt, prompt.live, caller) for prompt in await _table(p).all()]
    return {"data": views}


@agents.get("/prompts/{name}", response_model=PromptSeen)
async def get_prompt(
    request: ControlRequest, name: PathId, version: Annotated[int | None, Query(ge=1)] = None
) -> dict[str, Any]:
    """A prompt, for an agent that asks for its text.

    A rollout (its key, or `X-Rollout-Id`) gets the version that it keeps. If it is open and keeps none, it keeps the
    live one now, unless it asks for a `version`. A rollout's own key sees no `versions`.
    """
    p, caller = request.parts, request.caller
    rollout_id = caller.rollout_id or request.headers.get("x-rollout-id")
    prompt = await _table(p).get(check_id(name, "name"))
    asks_for_one = version is not None and caller.rollout_id is None
    if rollout_id is not None:
        await p.keys.require(caller, [check_id(rollout_id, "rollout_id")])
    if rollout_id is not None and not asks_for_one:
        await _table(p).pin([rollout_id], {name: prompt.live})
    kept = None if rollout_id is None else await _table(p).kept_by(rollout_id, name)
    chosen = kept if caller.rollout_id is not None else version or kept
    return await _view(p, prompt, chosen or prompt.live, caller)


@router.get("/prompts/{name}/rollouts", response_model=TriedOutList)
async def list_tried_out(request: ControlRequest, name: PathId, run: Id | None = None) -> dict[str, Any]:
    """The rollouts in which optimisations have tried versions of a prompt, oldest first. `run` names one of them.

    Those that were opened with the key that asks, an admin's or an evaluator's.
    """
    p, caller = request.parts, request.caller
    await _table(p).get(check_id(name, "name"))
    tried = await _table(p).tried_out(name, run, own=caller.own, key_id=caller.key_id)
    return {"data": tried}


@router.get("/prompts/{name}/versions/{version}/rollouts", response_model=KeptList)
async def list_kept(
    request: ControlRequest, name: PathId, version: Annotated[int, Path(ge=1, lt=2**31)], limit: Limit = 100
) -> dict[str, Any]:
    """The newest rollouts that kept a version."""
    p, caller = request.parts, request.caller
    (await _table(p).get(check_id(name, "name"))).text_of(version)
    kept = await _table(p).kept(name, version, limit, caller.sees)
    return {"data": kept}


@admins.post("/prompts", response_model=PromptSeen)
async def post_prompt(request: ControlRequest, body: PromptBody) -> dict[str, Any]:
    """Add a prompt, or a version of one. A text that a version has already is that version."""
    p, match = request.parts, body.match
    version = await _table(p).add(
        body.name, body.text, agent=match.agent if match else None, role=match.role if match else None,
        parent=body.parent, comment=body.comment, metrics=body.metrics, promote=body.promote,
    )  # fmt: skip
    if body.metrics:
        await _table(p).measured(body.name, version, body.metrics)
    if body.promote:
        request.caller.log_change(f"version {version} of prompt {body.name} was promoted")
    return await _view(p, await _table(p).get(body.name), version, request.caller)


@admins.post("/prompts/{name}/promote", response_model=PromptSeen)
async def promote_prompt(request: ControlRequest, name: PathId, body: PromptVersionBody) -> dict[str, Any]:
    """Make a version live now. Rollouts that have begun keep theirs."""
    p = request.parts
    await _table(p).promote(check_id(name, "name"), body.version)
    request.caller.log_change(f"version {body.version} of prompt {name} was promoted")
    return await _live(p, name, request.caller)


@admins.post("/prompts/{name}/rollback", response_model=PromptSeen)
async def rollback_prompt(request: ControlRequest, name: PathId) -> dict[str, Any]:
    """Make the version before the live one live again."""
    p = request.parts
    await _table(p).rollback(check_id(name, "name"))
    request.caller.log_change(f"prompt {name} was rolled back")
    return await _live(p, name, request.caller)


async def _live(p: Parts, name: str, caller: Caller) -> dict[str, Any]:
    prompt = await _table(p).get(name)
    return await _view(p, prompt, prompt.live, caller)


async def _view(p: Parts, prompt: Prompt, version: int, caller: Caller) -> dict[str, Any]:
    """The prompt as this caller may see it: code that the policy runs can read its rollout's key."""
    views: list[dict[str, Any]] = []
    if caller.rollout_id is None:
        rewards = await _table(p).rewards(prompt.name, own=caller.own, key_id=caller.sees)
        for one in prompt.versions:
            facts = {"live": one.version == prompt.live, "rewards": rewards.get(one.version, {})}
            views.append(asdict(one) | facts | ({"metrics": {}, "comment": None} if caller.own else {}))
    return {
        "name": prompt.name,
        "match": {"agent": prompt.agent, "role": prompt.role},
        "live_version": prompt.live,
        "version": version,
        "text": prompt.text_of(version),
        "versions": views,
    }


def _table(p: Parts) -> PromptTable:
    return PromptTable(p.store.database)
