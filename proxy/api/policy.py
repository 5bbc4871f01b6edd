"""Serves `/policy`: the live version, the history of versions and steps, comparisons, and changes of version."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from ...core.errors import Conflict
from ...core.json_text import fields_of
from ...core.records import Mode, PolicyVersion, PublishMode
from ...core.statistics import bootstrap_mean, mean_and_spread
from ...serving.swap import Swap, obstacle
from ...store.training import Collapse, Step
from ...store.versions import MeanReward, TaskMean
from .bodies import Body, Cursor, Integer, Limit, Listed, Page
from .requests import AdminRoute, ControlRequest, Parts, UserRoute

NO_SERVER = "no upstream of kind vllm is configured"

router = APIRouter(prefix="/policy", tags=["policy"], route_class=UserRoute)
admins = APIRouter(prefix="/policy", tags=["policy"], route_class=AdminRoute)

Number = Annotated[int, Query(ge=0, lt=2**63)]

LIVE = {"live": True, "promotable": True, "obstacle": None}


class Policy(BaseModel):
    """The live version, the last training step, and the collapse that stopped publishing, if any."""

    alias: str
    live_version: int
    served_model: str | None
    adapters: dict[str, str]
    publish: PublishMode
    live_at: float | None
    steps: int
    last_step: Step | None
    collapse: Collapse | None


@router.get("", response_model=Policy)
async def get_policy(request: ControlRequest) -> dict[str, Any]:
    """The live version, how it is served, the last training step, and the collapse that stopped publishing, if any."""
    p, caller = request.parts, request.caller
    added = [await plugin.policy_fields(p.store, caller.sees) for plugin in p.plugins]
    live, last = await p.store.versions.live(), await p.store.steps.last()
    view = {
        "alias": p.config.policy.alias,
        "live_version": live.version,
        "served_model": live.served_model,
        "adapters": live.adapters,
        "publish": p.publish,
        "live_at": live.live_at,
        "steps": last.step if last else 0,
        "last_step": last,
        "collapse": await p.store.steps.collapse(),
    }
    for fields in added:
        view |= fields
    return caller.shown("policy", view)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSeen(PolicyVersion):
    """A version. If it is not `promotable`, `obstacle` says why it cannot be made live.

    `rewards`: by mode, the mean reward of rollouts that began with it, in which each task counts once. `parent`: the
    version that its training step started from.
    """

    live: bool
    promotable: bool
    obstacle: str | None
    rewards: dict[Mode, MeanReward]
    parent: int | None


@router.get("/versions", response_model=Listed[VersionSeen])
async def get_versions(request: ControlRequest) -> dict[str, Any]:
    """All policy versions, oldest first, each with the metrics of its step and whether it can go live."""
    p, caller = request.parts, request.caller
    added = [await plugin.version_fields(p.store, caller.sees) for plugin in p.plugins]
    live, versions = await p.store.versions.live(), await p.store.versions.all()
    parents = await p.store.versions.parents()
    rewards = defaultdict[int, dict[str, MeanReward]](dict)
    earned = await p.store.versions.rewards([version.version for version in versions], caller.sees)
    for (mode, number), one in earned.items():
        rewards[number][mode] = MeanReward(one.mean, one.rollouts)
    data = []
    for version in versions:
        number, why_not = version.version, obstacle(version, p.publish) or (None if p.swap else NO_SERVER)
        view = fields_of(version) | {
            "live": number == live.version, "promotable": why_not is None, "obstacle": why_not,
            "rewards": rewards[number], "parent": parents.get(number),
        }  # fmt: skip
        for fields in added:
            view |= fields(number)
        data.append(caller.shown("version", view))
    return {"data": data}


@router.get("/steps", response_model=Page[Step])
async def get_steps(
    request: ControlRequest, cursor: Cursor = None, limit: Limit = 40, brief: bool = False
) -> dict[str, Any]:
    """The last training steps, newest first, with their metrics (docs/step-metrics.md), a page at a time.

    A page has the steps before the step given as `cursor`. With `brief`, the rewards by task are left out.
    """
    steps = await request.parts.store.steps.newest(limit, cursor, brief=brief)
    following = str(steps[-1].step) if len(steps) == limit else None
    return {"data": [request.caller.shown("step", fields_of(step)) for step in steps], "next_cursor": following}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSide(MeanReward):
    tokens: float | None = None
    latency_ms: float | None = None


@dataclass
class ComparedTask:
    """A task of both versions. With `costs`, each side has the mean `tokens` per rollout and `latency_ms` per call."""

    task_id: str
    a: TaskSide
    b: TaskSide


@dataclass
class Compared:
    """A comparison of two versions on the tasks that both had. Each task counts once, however many rollouts it has.

    `rollouts_a`, `rollouts_b`: the version's rollouts in `mode` that have a task, common or not, and a reward. A failed
    evaluation counts as a reward of 0.
    `difference`: how far `b` is above `a`, with its 95 % `interval` by the bootstrap over tasks, as `eval` shows it.
    The means, `difference` and `interval` are null if there is no common task.
    """

    a: int
    b: int
    mode: Mode
    rollouts_a: int
    rollouts_b: int
    tasks: int
    mean_a: float | None
    mean_b: float | None
    difference: float | None
    interval: tuple[float, float] | None
    data: list[ComparedTask]


@router.get("/compare")
async def compare(
    request: ControlRequest, a: Number, b: Number, mode: Mode | None = None, costs: bool = False
) -> Compared:
    """Compare two versions on the tasks where both have rewarded rollouts: how far `b` is above `a`.

    A version's rollouts are those that began with it and that no other model answered. Without `mode`, held-out
    rollouts are compared if both versions have some for a common task, else training ones. With `costs`, each task also
    has the mean sampled tokens of a rollout and the mean latency of its calls.
    """
    store = request.parts.store
    for version in (a, b):
        await store.versions.get(version)
    means = await store.versions.task_means((a, b), request.caller.sees, costs=costs)
    return await asyncio.to_thread(compared, means, a, b, mode)


class PromoteBody(Body):
    version: Integer


@admins.post("/promote", response_model=PolicyVersion)
async def promote(request: ControlRequest, body: PromoteBody) -> dict[str, Any]:
    """Make a version live. The trainer continues from it."""
    live = await _swap(request.parts).promote(body.version)
    request.caller.log_change(f"version {body.version} was promoted")
    return fields_of(live) | LIVE


@admins.post("/rollback", response_model=PolicyVersion)
async def rollback(request: ControlRequest) -> dict[str, Any]:
    """Make the previous version live again. The trainer continues from it."""
    live = await _swap(request.parts).rollback()
    request.caller.log_change(f"the policy was rolled back to version {live.version}")
    return fields_of(live) | LIVE


def _swap(p: Parts) -> Swap:
    if p.swap is None:
        raise Conflict(f"{NO_SERVER}, so no policy version can be served")
    return p.swap


def compared(means: Sequence[TaskMean], a: int, b: int, mode: Mode | None) -> Compared:
    """Return the comparison: how far `b` is above `a`, as the mean of the differences on common tasks.

    Without a mode, `eval` rollouts are compared if both versions have some for a common task, else `train` rollouts.
    """
    of = defaultdict[tuple[Mode, int], dict[str, TaskMean]](dict)
    for one in means:
        if one.task_id is not None:
            of[one.mode, one.version][one.task_id] = one
    mode = mode or ("eval" if of["eval", a].keys() & of["eval", b].keys() else "train")
    of_a, of_b = of[mode, a], of[mode, b]
    pairs = [(of_a[task], of_b[task]) for task in sorted(of_a.keys() & of_b.keys())]
    differences = [right.mean - left.mean for left, right in pairs]

    def mean(values: list[float]) -> float | None:
        return mean_and_spread(values)[0] if values else None

    def side(task: TaskMean) -> Any:
        if task.tokens is None:
            return MeanReward(task.mean, task.rollouts)
        return TaskSide(task.mean, task.rollouts, tokens=task.tokens, latency_ms=task.latency_ms)

    return Compared(
        a=a,
        b=b,
        mode=mode,
        rollouts_a=sum(one.rollouts for one in of_a.values()),
        rollouts_b=sum(one.rollouts for one in of_b.values()),
        tasks=len(pairs),
        mean_a=mean([left.mean for left, _ in pairs]),
        mean_b=mean([right.mean for _, right in pairs]),
        difference=mean(differences),
        interval=astuple(bootstrap_mean(differences)) if pairs else None,
        data=[ComparedTask(str(left.task_id), side(left), side(right)) for left, right in pairs],
    )
