"""`/prompts`: the texts that stand in for agents' own, their versions, and which one is live."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from ...core.records import check_id
from ...proxy.api.bodies import INTEGER, Body, Id, Limit, PathId
from ...proxy.api.requests import AdminRoute, AgentRoute, ControlRequest, UserRoute
from .table import Kept, Prompt, PromptTable, PromptVersion, Role, TriedOut

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


class PromptSeen(BaseModel):
    """`version` and `text`: those of the rollout that asks; without one, or before it keeps any, the live ones."""

    name: str
    match: Match
    live_version: int
    version: int
    text: str
    versions: list[PromptVersion]


class PromptList(BaseModel):
    data: list[PromptSeen]


class TriedOutList(BaseModel):
    data: list[TriedOut]


class KeptList(BaseModel):
    data: list[Kept]


@router.get("/prompts", response_model=PromptList)
async def list_prompts(request: ControlRequest) -> dict[str, Any]:
    """All prompts, by name, with their versions."""
    return {"data": [await _view(request, prompt) for prompt in await _table(request).all()]}


@agents.get("/prompts/{name}", response_model=PromptSeen)
async def get_prompt(
    request: ControlRequest, name: PathId, version: Annotated[int | None, Query(ge=1)] = None
) -> dict[str, Any]:
    """A prompt, for an agent that asks for its text.

    A rollout (its key, or `X-Rollout-Id`) gets the version that it keeps. If it is open and keeps none, it keeps the
    live one now, unless it asks for a `version`. A rollout's own key sees no `versions`.
    """
    caller, table = request.caller, _table(request)
    rollout_id = caller.rollout_id or request.headers.get("x-rollout-id")
    prompt = await table.get(check_id(name, "name"))
    if caller.rollout_id is not None:
        version = None
    if rollout_id is not None:
        await request.parts.keys.require(caller, [check_id(rollout_id, "rollout_id")])
        if version is None:
            await table.pin([rollout_id], {name: prompt.live})
            version = await table.kept_by(rollout_id, name)
    return await _view(request, prompt, version)


@router.get("/prompts/{name}/rollouts", response_model=TriedOutList)
async def list_tried_out(request: ControlRequest, name: PathId, run: Id | None = None) -> dict[str, Any]:
    """The rollouts in which optimisations have tried versions of a prompt, oldest first. `run` names one of them.

    Those that were opened with the key that asks, an admin's or an evaluator's.
    """
    caller, table = request.caller, _table(request)
    await table.get(check_id(name, "name"))
    return {"data": await table.tried_out(name, run, own=caller.own, key_id=caller.key_id)}


@router.get("/prompts/{name}/versions/{version}/rollouts", response_model=KeptList)
async def list_kept(
    request: ControlRequest, name: PathId, version: Annotated[int, Path(ge=1, lt=2**31)], limit: Limit = 100
) -> dict[str, Any]:
    """The newest rollouts that kept a version."""
    sees, table = request.caller.sees, _table(request)
    await table.get(check_id(name, "name"), version)
    return {"data": await table.kept(name, version, limit, own=sees is not None, key_id=sees)}


@admins.post("/prompts", response_model=PromptSeen)
async def post_prompt(request: ControlRequest, body: PromptBody) -> dict[str, Any]:
    """Add a prompt, or a version of one. A text that a version has already is that version."""
    match = body.match.model_dump() if body.match else {}
    version = await _table(request).add(**body.model_dump(exclude={"match"}), **match)
    if body.promote:
        request.caller.log_change(f"version {version} of prompt {body.name} was promoted")
    return await _view(request, await _table(request).get(body.name), version)


@admins.post("/prompts/{name}/promote", response_model=PromptSeen)
async def promote_prompt(request: ControlRequest, name: PathId, body: PromptVersionBody) -> dict[str, Any]:
    """Make a version live now. Rollouts that have begun keep theirs."""
    await _table(request).promote(check_id(name, "name"), body.version)
    request.caller.log_change(f"version {body.version} of prompt {name} was promoted")
    return await _view(request, await _table(request).get(name))


@admins.post("/prompts/{name}/rollback", response_model=PromptSeen)
async def rollback_prompt(request: ControlRequest, name: PathId) -> dict[str, Any]:
    """Make the version before the live one live again."""
    await _table(request).rollback(check_id(name, "name"))
    request.caller.log_change(f"prompt {name} was rolled back")
    return await _view(request, await _table(request).get(name))


async def _view(request: ControlRequest, prompt: Prompt, version: int | None = None) -> dict[str, Any]:
    """The prompt as the caller may see it: code that the policy runs can read its rollout's key."""
    caller, views, version = request.caller, list[PromptVersion](), version or prompt.live
    if caller.rollout_id is None:
        rewards = await _table(request).rewards(prompt.name, own=caller.own, key_id=caller.sees)
        views = [replace(one, rewards=rewards.get(one.version, {})) for one in prompt.versions]
    if caller.own:
        views = [replace(one, metrics={}, comment=None) for one in views]
    return {
        "name": prompt.name,
        "match": {"agent": prompt.agent, "role": prompt.role},
        "live_version": prompt.live,
        "version": version,
        "text": prompt.text_of(version),
        "versions": views,
    }


def _table(request: ControlRequest) -> PromptTable:
    return PromptTable(request.parts.store.database)
