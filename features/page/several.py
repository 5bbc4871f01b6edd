"""Serves the pages over several stores, each below a path of its own, behind a page that lists their curves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from html import escape
from secrets import compare_digest
from typing import NamedTuple

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.config.root import Config
from ...core.errors import LightningError
from ...proxy.app import Dispatch
from ...store.store import Store
from .alone import dashboard_api
from .page import HEADERS, TYPES, get_file

STEPS = 1000
WIDTH, HEIGHT = 480, 60
START = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>lightning-proxy</title>
<link rel="icon" href="page/icon.svg"><link rel="stylesheet" href="page/page.css"></head>
<body><main id="main"><h1>Reward by training step</h1><div class="table"><table>
<thead><tr><th>store</th><th>steps</th><th>last</th><th>held out, first → last</th><th>from 0 to {most}</th></tr>
</thead><tbody>
{rows}
</tbody></table></div></main></body></html>
"""


def create_dashboards(find: Callable[[], Sequence[tuple[str, Config]]], key: str) -> ASGIApp:
    """Return one app over named stores: `/0/` is the first one's page. `/?key=KEY` lists them.

    `find` is asked at each look at the list: a store that is new gets a page, too.
    """
    stores = _Stores(find)

    async def start(request: Request) -> Response:
        if not compare_digest(request.query_params.get("key", "").encode(), key.encode()):
            return Response("the address that `dashboard` printed has the key", 401)
        listed = [(f"{n}/#/?key={key}", name, await _found(store)) for n, name, store in await stores.look()]
        most = max((reward for *_, found in listed for reward in found.curve), default=1.0)
        rows = "\n".join(_row(*one, most) for one in listed)
        return Response(START.format(rows=rows, most=f"{most:.3g}"), headers=HEADERS, media_type=TYPES[".html"])

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with stores:
            await stores.look()
            yield

    routes = [Route("/", start), Route("/page/{name:path}", _file), Mount("/{n:int}", stores)]
    return Starlette(routes=routes, lifespan=lifespan)


class _Stores:
    """The pages of the stores that were found so far, by their number. It is the app below `/N`."""

    def __init__(self, find: Callable[[], Sequence[tuple[str, Config]]]) -> None:
        self._find = find
        self._opened: dict[str, FastAPI] = {}
        self._pages: list[Dispatch] = []
        self._stack, self._one_at_a_time = AsyncExitStack(), asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._stack.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def look(self) -> list[tuple[int, str, Store]]:
        """Return number, name and store of each that is there, in the order of their numbers. Open new ones."""
        async with self._one_at_a_time:
            found = {config.store.url: (name, config) for name, config in await asyncio.to_thread(self._find)}
            for url, (_, config) in found.items():
                if url not in self._opened:
                    control = dashboard_api(config)
                    with suppress(LightningError):  # it is only just made: the next look opens it
                        await self._stack.enter_async_context(control.router.lifespan_context(control))
                        self._opened[url] = control
                        self._pages.append(Dispatch(control, forwards=False))
        opened = enumerate(self._opened.items())
        return [(n, found[url][0], control.state.parts.store) for n, (url, control) in opened if url in found]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        n = scope["path_params"]["n"]
        page: ASGIApp = self._pages[n] if n < len(self._pages) else Response(status_code=404)
        await page(scope, receive, send)


async def _file(request: Request) -> Response:
    return await get_file(request, request.path_params["name"])


class _Found(NamedTuple):
    """Mean rewards: of each training step; of eval rollouts with the first and the last version that has any."""

    curve: list[float]
    held_out: list[float]


async def _found(store: Store) -> _Found:
    steps = reversed(await store.steps.newest(STEPS))
    curve = [reward for step in steps if (reward := step.metrics.get("reward_mean")) is not None]
    versions = [one.version for one in await store.versions.all()]
    earned = await store.version_report.rewards(versions)
    held_out = [mean.mean for (mode, _), mean in sorted(earned.items()) if mode == "eval"]
    return _Found(curve, held_out[:1] + held_out[1:][-1:])


def _row(address: str, name: str, found: _Found, most: float) -> str:
    curve = found.curve
    across, up = WIDTH / max(1, len(curve) - 1), HEIGHT / (most or 1.0)
    points = " ".join(f"{i * across:.1f},{HEIGHT - max(0.0, reward) * up:.1f}" for i, reward in enumerate(curve))
    drawn = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    last = f"{curve[-1]:.3g}" if curve else ""
    held_out = " → ".join(f"{mean:.3g}" for mean in found.held_out)
    return (
        f'<tr><td class="head"><a href="{escape(address)}">{escape(name)}</a></td>'
        f'<td data-label="steps">{len(curve)}</td><td data-label="last">{last}</td>'
        f'<td data-label="held out">{held_out}</td><td class="head">'
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{drawn}</svg></td></tr>'
    )
