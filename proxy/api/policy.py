"""`/policy`: the live version, the history of versions and steps, comparing versions, and changing what is live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ...core.errors import Conflict
from ...core.records import Mode, PolicyVersion
from ...core.statistics import bootstrap_mean, mean_and_spread
from ...serving.swap import Swap, obstacle
from ...store.versions import TaskMean
from .answers import ERRORS, Compared, Policy, Steps, Versions, answers
from .bodies import Cursor, PromoteBody
from .requests import AdminRoute, AgentRoute, Limit, Parts, caller_of, large_response, parts, parts_for_all, position_of
from .views import record_view, version_view

NO_SERVER = "no upstream of kind vllm is configured"

router = APIRouter(prefix="/policy", tags=["policy"], responses=ERRORS, route_class=AgentRoute)
admins = APIRouter(route_class=AdminRoute)

Number = Annotated[int, Query(ge=0, lt=2**63)]

SEED = 0  # of the bootstrap, so that the same rewards always give the same interval

ByTask = Mapping[str, TaskMean]


@router.get("", response_model=None, responses=answers(Policy))
async def get_policy(request: Request) -> dict[str, Any]:
    """The live version, how it is served, the last training step, and the collapse that publication is stopped for.

    And the test of the version that may go live next (docs/promotion.md).
    """
    p, sight = await parts_for_all(request), caller_of(request).sight
    added = [await plugin.policy_fields(p.store, sight.key_id) for plugin in p.plugins]
    live, last, collapse = await p.store.versions.live(), await p.store.steps.last(), await p.store.steps.collapse()
    view = {
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
    for fields in added:
        view |= fields
    return sight.of("policy", view)


@router.get("/versions", response_model=None, responses=answers(Versions))
async def get_versions(request: Request) -> Response:
    """Every policy version, oldest first, with the metrics of the step that made it, and whether it can go live.

    `rewards`: by mode, the mean reward over tasks of the rollouts that began with it. `parent`: the version that its
    step started from.
    """
    p, sight = await parts_for_all(request), caller_of(request).sight
    added = [await plugin.version_fields(p.store, sight.key_id) for plugin in p.plugins]
    live, versions = (await p.store.versions.live()).version, await p.store.versions.all()
    parents = await p.store.version_report.parents()
    earned = await p.store.version_report.rewards([v.version for v in versions], sight.key_id)
    rewards: dict[int, dict[str, Any]] = {}
    for (mode, version), one in earned.items():
        rewards.setdefault(version, {})[mode] = {"mean": one.mean, "rollouts": one.rollouts}

    def view(v: PolicyVersion) -> dict[str, Any]:
        facts: dict[str, Any] = {"rewards": rewards.get(v.version, {}), "parent": parents.get(v.version)}
        for fields in added:
            facts |= fields(v.version)
        why_not = obstacle(v, p.mode.mode) or (NO_SERVER if p.swap is None else None)
        return sight.of("version", version_view(v, live, why_not) | facts)

    return await large_response(lambda: {"data": [*map(view, versions)]})


@router.get("/steps", response_model=None, responses=answers(Steps))
async def get_steps(request: Request, limit: Limit = 40, cursor: Cursor = None, brief: bool = False) -> Response:
    """The last training steps, newest first, with all that they report (docs/metrics.md), a page at a time.

    The steps of a page come before the step that is its `cursor`. With `brief`, the rewards by task are left out.
    """
    p, sight, before = await parts_for_all(request), caller_of(request).sight, position_of(cursor)
    steps = await p.store.steps.newest(limit, before, brief=brief)
    following = str(steps[-1].step) if len(steps) == limit else None
    views = [sight.of("step", record_view(step)) for step in steps]
    return await large_response(lambda: {"data": views, "next_cursor": following})


@router.get("/compare", response_model=None, responses=answers(Compared))
async def compare(request: Request, a: Number, b: Number, mode: Mode | None = None, costs: bool = False) -> Response:
    """Compare two versions on the tasks of which both have rewarded rollouts: how far `b` is above `a`.

    A version's rollouts are those that began with it and that no other model answered. Without `mode`, held-out
    rollouts are compared if both versions have some of a common task, else those of training. With `costs`, each task
    has the mean tokens of a rollout and the mean latency of its calls, too.
    """
    p, sight = await parts_for_all(request), caller_of(request).sight
    for version in (a, b):
        await p.store.versions.get(version)
    means = await p.store.version_report.task_means((a, b), sight.key_id, costs=costs)
    return await large_response(lambda: compared(means, a, b, mode))


@admins.post("/promote", response_model=None, responses=answers(PolicyVersion))
async def promote(request: Request, body: PromoteBody) -> dict[str, Any]:
    """Make a version live; the trainer continues from it."""
    live = await _swap(parts(request)).promote(body.version)
    caller_of(request).log_change(f"version {body.version} was promoted")
    return version_view(live, body.version)


@admins.post("/rollback", response_model=None, responses=answers(PolicyVersion))
async def rollback(request: Request) -> dict[str, Any]:
    """Make the version before the live one live again; the trainer continues from it."""
    live = await _swap(parts(request)).rollback()
    caller_of(request).log_change(f"the policy was rolled back to version {live.version}")
    return version_view(live, live.version)


router.include_router(admins)


def _swap(p: Parts) -> Swap:
    if p.swap is None:
        raise Conflict(f"{NO_SERVER}: there are no policy versions to serve")
    return p.swap


def compared(means: Sequence[TaskMean], a: int, b: int, mode: Mode | None) -> dict[str, Any]:
    """Return the comparison as JSON: how far `b` is above `a`, as a mean over tasks, paired.

    Without a mode, rollouts of `eval` are compared if both versions have some of a common task, else those of `train`.
    """
    mode = mode or ("eval" if _by_task(means, a, "eval").keys() & _by_task(means, b, "eval").keys() else "train")
    of_a, of_b = _by_task(means, a, mode), _by_task(means, b, mode)
    tasks = sorted(of_a.keys() & of_b.keys())
    differences = [of_b[task].mean - of_a[task].mean for task in tasks]
    return {
        "a": a,
        "b": b,
        "mode": mode,
        "rollouts_a": sum(mean.rollouts for mean in of_a.values()),
        "rollouts_b": sum(mean.rollouts for mean in of_b.values()),
        "tasks": len(tasks),
        "mean_a": mean_and_spread([of_a[task].mean for task in tasks])[0] if tasks else None,
        "mean_b": mean_and_spread([of_b[task].mean for task in tasks])[0] if tasks else None,
        "difference": mean_and_spread(differences)[0] if tasks else None,
        "interval": astuple(bootstrap_mean(differences, SEED)) if tasks else None,
        "data": [{"task_id": task, "a": _side_view(of_a[task]), "b": _side_view(of_b[task])} for task in tasks],
    }


def _by_task(means: Sequence[TaskMean], version: int, mode: Mode) -> ByTask:
    return {one.task_id: one for one in means if (one.version, one.mode) == (version, mode) and one.task_id is not None}


def _side_view(mean: TaskMean) -> dict[str, Any]:
    costs = {"tokens": mean.tokens, "latency_ms": mean.latency_ms}
    return {"mean": mean.mean, "rollouts": mean.rollouts} | (costs if mean.tokens is not None else {})
