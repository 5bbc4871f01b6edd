"""`dashboard`: the page over stores alone. No proxy need run, and nothing is written.

Several stores are served below a path each, behind a page that lists their curves.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from html import escape
from pathlib import Path
from secrets import compare_digest
from typing import Any, NamedTuple

import typer
from fastapi import APIRouter, FastAPI
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...commands.serve import UVICORN
from ...commands.system.processes import require_free_port
from ...core.config.root import Config
from ...core.config.server import ProxyConfig, StoreConfig
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import LightningError
from ...proxy.app import Dispatch, api_to_read
from ...store.opening import opened
from ...store.sqlite.file import IdleFile, is_in_use
from ...store.store import Store
from .proxy import HEADERS, TYPES, get_file

HOST = "127.0.0.1"
# A configuration needs an upstream. This one is never asked.
_NONE = UpstreamConfig(name="none", kind="openai", base_url=f"http://{HOST}:9/v1")
router = APIRouter()
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


def dashboard(find: Callable[[], Sequence[StoreConfig]], port: int, *, is_folder: bool) -> None:
    """Serve the page until Ctrl-C. LightningError if the port is taken, or a store cannot be read.

    Whoever has the address that is printed can look: it holds a key that is made for this once. `is_folder`: `find` may
    return further stores later.
    """
    from uvicorn import Config as Settings
    from uvicorn import Server

    places = _Places(find)
    stores = places.find()
    if missing := next((path for path in _files(stores) if not path.is_file()), None):
        raise LightningError(f"there is no store at {missing}: name one with --store FILE")
    for store in stores:
        asyncio.run(_require_readable(store))
    require_free_port(HOST, port, "--port")
    key = secrets.token_urlsafe(16)
    proxy = ProxyConfig(port=port, api_keys=[SecretStr(key)])

    def named() -> list[tuple[str, Config]]:
        now = places.find()
        configs = [Config(store=store, proxy=proxy, upstreams=[_NONE]) for store in now]
        return list(zip(_names(now), configs, strict=True))

    if len(stores) == 1 and not is_folder:
        app, what, where = create_dashboard(named()[0][1]), stores[0].where, "#/"
    else:
        app, what, where = create_dashboards(named, key), f"{len(stores)} store{'s' * (len(stores) > 1)}", ""
    server = Server(Settings(app, host=HOST, port=port, **UVICORN))
    typer.echo(f"{what}: http://{HOST}:{port}/{where}?key={key}")
    typer.echo("Ctrl-C stops. Nothing is written to the store.", err=True)
    threading.Thread(target=end_when_written, args=(places.idle, server), daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run()
    if written := next((file for file in places.idle if file.is_written()), None):
        raise LightningError(
            f"{written.path} is in use again, so the page would be out of date: start the dashboard again"
        )


def _files(stores: Iterable[StoreConfig]) -> list[Path]:
    return [store.path.expanduser().absolute() for store in stores if not store.is_postgres]


class _Places:
    """The stores that are shown, found anew at each look. `idle`: those that nobody used when they were first seen."""

    def __init__(self, find: Callable[[], Sequence[StoreConfig]]) -> None:
        self._find = find
        self._seen: set[Path] = set()
        self.idle: list[IdleFile] = []

    def find(self) -> Sequence[StoreConfig]:
        stores = self._find()
        new = {*_files(stores)} - self._seen
        self._seen |= new
        self.idle += [IdleFile(path) for path in new if not is_in_use(path)]
        return stores


def stores_at(place: str) -> list[StoreConfig]:
    """Return the store at a file or URL, or all in a folder. Raise LightningError for a folder without one."""
    if "://" in place:
        return [StoreConfig(url=place)]
    path = Path(place).absolute()
    found = sorted(path.rglob("lightning.db")) if path.is_dir() else [path]
    if not found:
        raise LightningError(f"there is no lightning.db in {path}: name a store with --store FILE")
    return [StoreConfig(url=f"sqlite:///{file}") for file in found]


def _names(stores: Sequence[StoreConfig]) -> list[str]:
    """What tells the stores apart: files are named from the folder that they share."""
    shared = os.path.commonpath([Path(store.where).parent for store in stores if not store.is_postgres] or [Path("/")])
    return [
        store.where if store.is_postgres else os.path.relpath(store.where, shared).removesuffix("/lightning.db")
        for store in stores
    ]


def end_when_written(files: Sequence[IdleFile], server: Any) -> None:
    """Stop the server once one of the files is written. Return when the server stops."""
    while not server.should_exit:
        time.sleep(0.5)
        if any(file.is_written() for file in files):
            server.should_exit = True


async def _require_readable(store: StoreConfig) -> None:
    """Raise StoreUnavailable."""
    async with opened(store, to_write=False):
        pass


@router.get("/readyz")
async def readyz() -> dict[str, str]:
    """There is nothing that could answer a call."""
    return {"status": "alone", "store": "ok"}


def create_dashboard(config: Config) -> ASGIApp:
    """Return the page over a store as an app."""
    return Dispatch(dashboard_api(config))


def dashboard_api(config: Config) -> FastAPI:
    """Return the page and the routes that read."""
    return api_to_read(config, router)


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
                        self._pages.append(Dispatch(control))
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
    earned = await store.versions.rewards(versions)
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
