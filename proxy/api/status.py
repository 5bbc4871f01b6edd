"""Serves `/status`, `/healthz`, `/readyz` and `/metrics`: what waits, and whether calls are answered."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from ...core.config.address import without_addresses
from ...core.errors import LightningError, StoreUnavailable
from ...core.records import CollapseSign, Mode, RolloutStatus
from ...serving.health import replica_name
from ...store.reports import RecentTraffic
from ...store.retention import over_bound
from ...store.rewards import Uncounted
from ...store.store import Store
from ...store.training import Collapse
from ...store.waiting import Standstill
from .bodies import ERRORS
from .requests import ControlRequest, Parts, UserRoute

router = APIRouter(tags=["status"], route_class=UserRoute)
health = APIRouter(tags=["health"], responses=ERRORS)

NEWEST = 200
RECENT_CALLS = 500


@dataclass
class Verified:
    """How the live version was verified; `story` is the same in a sentence.

    `deviations`: by how many standard deviations the servers' answers matched the new weights rather than the old ones;
    null if not recorded. `difference`: the answers' distance from the trainer's log-probabilities, in nats. `by`:
    what was compared instead if answers were inconclusive. `probed_at`: when the proxy last compared an answer with the
    version's first one, or stored the first (Unix time); `problem`: how these answers differed.
    """

    version: int
    verified: bool
    deviations: float | None
    difference: float | None
    by: str | None
    probed_at: float | None
    problem: str | None
    story: str


class Status(BaseModel):
    """`rollouts`: counts by mode and status. `waiting`: how many complete rollouts no step has taken yet.

    `dropped`: how many of the newest 200 training rollouts will not be trained on, by reason. `unrewarded`: how many of
    the newest 200 are completed but have no reward that counts; `other_rewards`: how many of these got a reward
    with another name, by name. `untrainable`: how many of the policy's newest 200 calls cannot be trained on, by
    reason. `publishing`: why new weights cannot reach the policy's server. `standstill`: why nothing was learned from
    the newest rollouts. `collapse`: as in `GET /policy`. `uncounted`: set if none of the newest rewards is trusted.
    `verified`: how the live version was verified. `recent`: figures for the newest 500 calls.
    `per_step`: how many rollouts a training step takes. For a key that sees only its own rollouts, `untrainable` and
    `plugins` are empty, and `per_step`, `standstill`, `uncounted`, `collapse`, `verified` and `recent` are null.
    """

    rollouts: dict[Mode, dict[RolloutStatus, int]]
    waiting: int
    per_step: int | None
    dropped: dict[str, int]
    unrewarded: int
    other_rewards: dict[str, int]
    untrainable: dict[str, int]
    publishing: str | None
    standstill: Standstill | None
    uncounted: Uncounted | None
    collapse: Collapse | None
    verified: Verified | None
    plugins: list[str]
    recent: RecentTraffic | None


@router.get("/status", response_model=Status)
async def get_status(request: ControlRequest) -> dict[str, Any]:
    """Counts of rollouts by mode and status, why some are not trained on, and how the live version was verified.

    For a key that sees only its own rollouts, only its newest 20,000 are counted.
    """
    p, caller = request.parts, request.caller
    store, filters, per_step = p.store, {"mode": "train"}, p.config.trainer.rollouts_per_step
    if caller.sees is None:
        counts, waits = await store.rollouts.counts(), await waiting(p)
    else:
        counts, waits = await store.rollouts.counts_of_key(caller.sees)
        filters["key_id"] = caller.sees
    rollouts = defaultdict[str, dict[str, int]](dict)
    for (mode, status), count in sorted(counts.items()):
        rollouts[mode][status] = count
    newest, _ = await store.rollouts.page(filters, NEWEST)
    unrewarded, names = await store.waiting.unrewarded(newest)
    view = {
        "rollouts": rollouts,
        "waiting": waits,
        "per_step": per_step,
        "dropped": dict(Counter(one.dropped for one in newest if one.dropped).most_common()),
        "unrewarded": unrewarded,
        "other_rewards": names,
        "publishing": p.swap and p.swap.why_not_published(),
        "untrainable": await store.calls.untrainable(NEWEST),
        "standstill": await store.waiting.standstill(per_step),
        "uncounted": await store.rewards.uncounted(),
        "collapse": await store.steps.collapse(),
        "verified": await verified(store),
        "plugins": p.config.plugins,
        "recent": await store.reports.traffic(RECENT_CALLS),
    }
    for plugin in p.plugins:
        view |= await plugin.status_fields(store, caller.sees)
    return caller.shown("status", view)


async def waiting(p: Parts) -> int:
    """Return how many complete rollouts wait for the trainer."""
    trainer = p.config.trainer
    return await p.store.waiting.count(lone=trainer.takes_lone_rollouts, failed=trainer.failed_reward is not None)


async def verified(store: Store) -> Verified:
    """Read how the live version was verified, and when it was last probed."""
    live = await store.versions.live()
    step, probed = await store.steps.of_version(live.version), await store.versions.probed(live.version)
    metrics = step.metrics if step is not None and step.metrics.get("version") == live.version else {}
    deviations, by = metrics.get("verify_deviations"), metrics.get("verified_by")
    if live.version == 0:
        story = "the base model: there is nothing to verify"
    elif not live.verified:
        story = "not verified yet: merged weights on a single server are compared once they answer agents"
    elif by is not None:
        story = f"by {by} alone: the answers of new and old weights are too similar"
    elif deviations is None:
        story = "the margin is not recorded"
    else:
        story = f"the new weights are {deviations:.3g} standard deviations from the old"
    at, problem = (probed.at, probed.problem) if probed else (None, None)
    return Verified(live.version, live.verified, deviations, metrics.get("verify_difference"), by, at, problem, story)


@health.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer with 200: the process is running."""
    return {"status": "ok"}


class Ready(BaseModel):
    """`down`: watched servers that do not answer or lack the live version. `retention`: why the store is too large.

    `publish`: set if the trainer publishes in another mode than this proxy serves.
    """

    status: Literal["ready", "degraded", "not ready"]
    store: str
    upstream: str
    policy: str | None = None
    publish: str | None = None
    retention: str | None = None
    down: list[str] = []


@health.get("/readyz", response_model=Ready, responses={503: {"model": Ready}})
async def readyz(request: Request) -> Response:
    """Answer with 200 if a call for the alias would be answered and recorded, else with 503 and the reason."""
    p: Parts = request.app.state.parts
    checks, warnings = {"store": "ok", "upstream": "ok"}, dict[str, str | None]()
    try:
        await _require_store(p)
        warnings = {
            "policy": (await verified(p.store)).problem,
            "publish": None if p.watch is None else p.watch.other_mode,
            "store": p.store.database.damage,
            "retention": await over_bound(p.store.database, p.config.store.retention),
        }
    except LightningError as error:
        checks["store"] = error.message
    first, *standing_by = p.router.of_alias()
    try:
        checks["upstream"] = await p.health.ask(first) or "ok"
        if p.watch is not None and checks["upstream"] == "ok":
            await p.watch.current()
    except LightningError as error:
        checks["upstream"] = error.message
    answers = checks["upstream"] == "ok"
    for other in standing_by:
        answers = answers or (not p.health.is_down(other) and await p.health.ask(other) is None)
    is_ready = answers and checks["store"] == "ok"
    if is_ready:
        checks |= {name: warning for name, warning in warnings.items() if warning is not None}
    # A fallback answers, or other weights, or the store is too large or damaged.
    status = "not ready" if not is_ready else "ready" if {*checks.values()} == {"ok"} else "degraded"
    view: dict[str, Any] = {"status": status} | {name: without_addresses(check) for name, check in checks.items()}
    named = {upstream.name: upstream for upstream in p.config.upstreams}
    if down := [named[name].server_name(url) for (name, url), problem in p.health.problems.items() if problem]:
        view["down"] = down
    return JSONResponse(view, 200 if is_ready else 503)


async def _require_store(p: Parts) -> None:
    """Raise StoreUnavailable unless a call's record could be written now."""
    await p.store.versions.live()
    await p.store.database.require_writable()
    p.recorder.require()


@health.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format. While the store does not answer, its numbers are the last known ones."""
    p: Parts = request.app.state.parts
    show = p.metrics.set
    show("recorder_queue", p.recorder.depth)
    show("rollouts_per_step", p.config.trainer.rollouts_per_step)
    for (name, url), problem in p.health.problems.items():
        show("upstream_up", problem is None, name, replica_name(url))
    directories = {"policy": p.config.policy.directory}
    if not p.config.store.is_postgres:
        directories["store"] = p.config.store.path.absolute().parent
    for what, directory in directories.items():
        with suppress(OSError):  # no policy was published yet
            show("disk_free_bytes", (await asyncio.to_thread(shutil.disk_usage, directory)).free, what)
    try:
        await _require_store(p)
        seen, collapse = await verified(p.store), await p.store.steps.collapse()
        show("policy_version", seen.version)
        show("policy_verify_deviations", seen.deviations or 0.0)
        show("policy_probed_seconds", seen.probed_at or 0.0)
        show("policy_probe_ok", seen.problem is None)
        for sign in get_args(CollapseSign):
            show("policy_collapsed", collapse is not None and collapse.sign == sign, sign)
        show("rollouts_waiting", await waiting(p))
        show("step_began_seconds", await p.store.steps.under_way_since() or 0)
        if (last := await p.store.steps.last()) is not None:
            for name, value in {"step": last.step, **last.metrics}.items():
                if isinstance(value, int | float):
                    show("step", value, name)
        for (mode, status), count in (await p.store.rollouts.counts()).items():
            show("rollouts", count, mode, status)
        for plugin in p.plugins:
            await plugin.measure(p.store, p.metrics)
        show("store_up", 1)
    except StoreUnavailable:
        show("store_up", 0)
    return Response(p.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
