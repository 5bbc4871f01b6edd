"""`/policy`: the live version, the history of versions and steps, and changing what is live. Contract, section 3."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from ..errors import Conflict
from ..policy.swap import Swap, obstacle
from ..types import PolicyVersion
from .answers import ERRORS, Policy, Steps, Versions, answers
from .bodies import PromoteBody
from .door import AdminRoute, AgentRoute
from .parts import Parts
from .requests import Limit, large_response, parts, parts_for_all
from .views import record_view, version_view

router = APIRouter(prefix="/policy", tags=["policy"], responses=ERRORS, route_class=AgentRoute)
admins = APIRouter(route_class=AdminRoute)


@router.get("", response_model=None, responses=answers(Policy))
async def get_policy(request: Request) -> dict[str, Any]:
    """The live version, how it is served, the last training step, and the collapse that publication is stopped for."""
    p = await parts_for_all(request)
    live, last, collapse = await p.store.versions.live(), await p.store.steps.last(), await p.store.steps.collapse()
    return {
        "alias": p.config.policy.alias,
        "live_version": live.version,
        "served_model": live.served_model,
        "adapters": live.adapters,
        "publish": p.mode.mode,
        "live_at": live.live_at,
        "steps": last.step if last else 0,
        "last_step": asdict(last) if last else None,
        "collapse": asdict(collapse) if collapse else None,
    }


@router.get("/versions", response_model=None, responses=answers(Versions))
async def get_versions(request: Request) -> Response:
    """Every policy version, oldest first, with the metrics of the step that made it, and whether it can go live."""
    p = await parts_for_all(request)
    live, versions = (await p.store.versions.live()).version, await p.store.versions.all()
    mode = p.mode.mode
    return await large_response(lambda: {"data": [version_view(v, live, obstacle(v, mode)) for v in versions]})


@router.get("/steps", response_model=None, responses=answers(Steps))
async def get_steps(request: Request, limit: Limit = 40) -> Response:
    """The last training steps, newest first, with all that they report (docs/metrics.md)."""
    p = await parts_for_all(request)
    steps = await p.store.steps.newest(limit)
    return await large_response(lambda: {"data": [*map(record_view, steps)]})


@admins.post("/promote", response_model=None, responses=answers(PolicyVersion))
async def promote(request: Request, body: PromoteBody) -> dict[str, Any]:
    """Make a version live; the trainer goes on from it."""
    p = parts(request)
    return version_view(await _swap(p).promote(body.version), body.version)


@admins.post("/rollback", response_model=None, responses=answers(PolicyVersion))
async def rollback(request: Request) -> dict[str, Any]:
    """Make the version before the live one live again; the trainer goes on from it."""
    p = parts(request)
    live = await _swap(p).rollback()
    return version_view(live, live.version)


router.include_router(admins)


def _swap(p: Parts) -> Swap:
    if p.swap is None:
        raise Conflict("no upstream of kind vllm is configured: there are no policy versions to serve")
    return p.swap
