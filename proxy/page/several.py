"""Serves the pages over several stores, each below a path of its own, behind a page that lists their curves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from html import escape
from secrets import compare_digest

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from ..app import Dispatch
from ..config.root import Config
from ..store.store import Store
from .dashboard import dashboard_api
from .page import HEADERS, TYPES, get_file

STEPS = 1000
WIDTH, HEIGHT = 480, 60
START = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>lightning-proxy</title>
<link rel="icon" href="page/icon.svg"><link rel="stylesheet" href="page/page.css"></head>
<body><main id="main"><h1>Reward by training step</h1><div class="table"><table>
<thead><tr><th>store</th><th>steps</th><th>last</th><th>from 0 to {most}</th></tr></thead><tbody>
{rows}
</tbody></table></div></main></body></html>
"""


def create_dashboards(stores: Sequence[tuple[str, Config]], key: str) -> ASGIApp:
    """Return one app over named stores: `/0/` is the first one's page. `/?key=KEY` lists them."""
    controls = [dashboard_api(config) for _, config in stores]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for control in controls:
                await stack.enter_async_context(control.router.lifespan_context(control))
            yield

    async def start(request: Request) -> Response:
        if not compare_digest(request.query_params.get("key", "").encode(), key.encode()):
            return Response("the address that `dashboard` printed has the key", 401)
        curves = [await _curve(control.state.parts.store) for control in controls]
        most = max((reward for curve in curves for reward in curve), default=1.0)
        named = enumerate(zip((name for name, _ in stores), curves, strict=True))
        rows = "\n".join(_row(f"{n}/#/?key={key}", name, curve, most) for n, (name, curve) in named)
        return Response(START.format(rows=rows, most=f"{most:.3g}"), headers=HEADERS, media_type=TYPES[".html"])

    pages = [Mount(f"/{n}", Dispatch(control, forwards=False)) for n, control in enumerate(controls)]
    return Starlette(routes=[Route("/", start), Route("/page/{name:path}", _file), *pages], lifespan=lifespan)


async def _file(request: Request) -> Response:
    return await get_file(request, request.path_params["name"])


async def _curve(store: Store) -> list[float]:
    """The mean reward of each training step, in order."""
    steps = reversed(await store.steps.newest(STEPS))
    return [reward for step in steps if (reward := step.metrics.get("reward_mean")) is not None]


def _row(address: str, name: str, curve: Sequence[float], most: float) -> str:
    across, up = WIDTH / max(1, len(curve) - 1), HEIGHT / (most or 1.0)
    points = " ".join(f"{i * across:.1f},{HEIGHT - max(0.0, reward) * up:.1f}" for i, reward in enumerate(curve))
    drawn = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    last = f"{curve[-1]:.3g}" if curve else ""
    return (
        f'<tr><td class="head"><a href="{escape(address)}">{escape(name)}</a></td>'
        f'<td data-label="steps">{len(curve)}</td><td data-label="last">{last}</td><td class="head">'
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{drawn}</svg></td></tr>'
    )
