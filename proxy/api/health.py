"""`/healthz`, `/readyz` and `/metrics`: whether the process lives, whether calls would be answered, and counts."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from ...core.config.address import without_addresses
from ...core.errors import LightningError, StoreUnavailable
from ...serving.health import replica_name
from ...store.retention import over_bound
from .answers import ERRORS, Ready, answers
from .requests import Parts, parts
from .status import waiting
from .verified import verified

router = APIRouter(tags=["health"], responses=ERRORS)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}


@router.get("/readyz", responses=answers(Ready) | answers(Ready, 503))
async def readyz(request: Request) -> Response:
    """Answer 200 if a call for the alias would be answered and recorded, else 503 and why; `down`: watched servers."""
    p = parts(request)
    checks, over = {"store": "ok", "upstream": "ok"}, None
    try:
        await _require_store(p)
        over = await over_bound(p.store.database, p.config.store.retention)
    except LightningError as error:
        checks["store"] = error.message
    first, *standing_by = p.router.of_alias()
    try:
        if p.watch is None:
            checks["upstream"] = await p.reach.problem(first) or "ok"
        elif not await p.watch.reachable():
            checks["upstream"] = "not reachable"
        else:
            await p.watch.require()
    except LightningError as error:
        checks["upstream"] = error.message
    answered = checks["upstream"] == "ok" or any(
        [not p.health.is_down(other) and await p.reach.problem(other) is None for other in standing_by]
    )
    status = "not ready" if checks["store"] != "ok" or not answered else "ready"
    if status == "ready" and (other := await _other_weights(p)) is not None:
        checks["policy"] = other
    if status == "ready" and p.mode.problem is not None:
        checks["publish"] = p.mode.problem
    if status == "ready" and p.store.database.damage is not None:
        checks["store"] = p.store.database.damage
    if status == "ready" and over is not None:
        checks["retention"] = over
    if status == "ready" and any(check != "ok" for check in checks.values()):
        status = "degraded"  # a fallback answers, or other weights, or the store is too large or damaged
    named = {upstream.name: upstream for upstream in p.config.upstreams}
    down = [named[name].server_name(url) for (name, url), problem in p.health.problems.items() if problem is not None]
    view = {"status": status, **{name: without_addresses(check) for name, check in checks.items()}} | (
        {"down": down} if down else {}
    )
    return JSONResponse(view, 503 if status == "not ready" else 200)


async def _require_store(p: Parts) -> None:
    """Raise StoreUnavailable unless a call's record could be written now."""
    await p.store.versions.live()
    await p.store.database.require_writable()
    p.recorder.require()


async def _other_weights(p: Parts) -> str | None:
    """Why the policy's server does not seem to serve the live version."""
    return await p.store.probes.problem((await p.store.versions.live()).version)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format. While the store does not answer, what it holds is as at the last look."""
    p = parts(request)
    p.metrics.queue.set(p.recorder.depth)
    p.metrics.per_step.set(p.config.trainer.rollouts_per_step)
    for (name, url), problem in p.health.problems.items():
        p.metrics.upstream_up.labels(name, replica_name(url)).set(problem is None)
    await asyncio.to_thread(_measure_disks, p)
    try:
        await _require_store(p)
        await _measure_store(p)
        p.metrics.store_up.set(1)
    except StoreUnavailable:
        p.metrics.store_up.set(0)
    return Response(p.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _measure_store(p: Parts) -> None:
    seen = await verified(p.store)
    p.metrics.seen_served(seen.version, seen.deviations, seen.probed_at, ok=seen.problem is None)
    p.metrics.waiting.set(await waiting(p))
    p.metrics.stopped_for(await p.store.steps.collapse())
    p.metrics.step_began.set(await p.store.steps.under_way_since() or 0)
    if (last := await p.store.steps.last()) is not None:
        p.metrics.step_ended(last.step, last.metrics)
    for (mode, status), count in (await p.store.rollouts.counts()).items():
        p.metrics.rollouts.labels(mode, status).set(count)
    for plugin in p.plugins:
        await plugin.measure(p.store, p.metrics)


def _measure_disks(p: Parts) -> None:
    directories = {"policy": p.config.policy.directory}
    if not p.config.store.is_postgres:
        directories["store"] = p.config.store.path.expanduser().absolute().parent
    for what, directory in directories.items():
        with suppress(OSError):  # no policy was published yet
            p.metrics.disk_free.labels(what).set(shutil.disk_usage(directory).free)
