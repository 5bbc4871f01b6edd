"""`dashboard`: the page over stores alone. No proxy need run, and nothing is written.

Several stores are served below a path each, behind a page that lists their curves.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from html import escape
from pathlib import Path
from typing import Any

import typer
from fastapi import APIRouter
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

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
LIST = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>lightning-proxy</title>
<link rel="icon" href="page/icon.svg"><link rel="stylesheet" href="page/page.css"></head>
<body><main id="main"><h1>Reward by training step</h1><div class="table"><table>
<thead><tr><th>store</th><th>steps</th><th>last</th><th>held out, first → last</th><th>from 0 to {most}</th></tr>
</thead><tbody>
{rows}
</tbody></table></div></main></body></html>
"""
ROW = """<tr><td class="head"><a href="{address}">{name}</a></td><td data-label="steps">{steps}</td>
<td data-label="last">{last}</td><td data-label="held out">{held_out}</td><td class="head">
<svg class="curve" viewBox="0 0 {width} 1" preserveAspectRatio="none"><polyline points="{points}"/></svg></td></tr>"""


def dashboard(find: Callable[[], Sequence[StoreConfig]], port: int, *, is_folder: bool) -> None:
    """Serve the page until Ctrl-C. LightningError if the port is taken, or a store cannot be read.

    Whoever has the address that is printed can look: it holds a key that is made for this once. `is_folder`: `find` may
    return further stores later.
    """
    import uvicorn

    found = find()
    for store in found:
        if not store.is_postgres and not _file(store).is_file():
            raise LightningError(f"there is no store at {_file(store)}: name one with --store FILE")
        asyncio.run(_require_readable(store))
    require_free_port(HOST, port, "--port")
    stores = Stores(find, secrets.token_urlsafe(16), port)
    routes: list[BaseRoute] = [Mount("/", stores)]
    what, where = found[0].where, "#/"
    if len(found) > 1 or is_folder:
        routes = [Route("/", stores.listed), Route("/page/{name:path}", _page_file), Mount("/{n:int}", stores)]
        what, where = f"{len(found)} store{'s' * (len(found) > 1)}", ""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with stores.opened():
            typer.echo(f"{what}: http://{HOST}:{port}/{where}?key={stores.key}")
            typer.echo("Ctrl-C stops. Nothing is written to the store.", err=True)
            yield

    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes, lifespan=lifespan), host=HOST, port=port, **UVICORN)
    )
    threading.Thread(target=end_when_written, args=(stores.idle, server), daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run()
    if written := next((file for file in stores.idle if file.is_written()), None):
        raise LightningError(
            f"{written.path} is in use again, so the page would be out of date: start the dashboard again"
        )


def stores_at(place: str) -> list[StoreConfig]:
    """Return the store at a file or URL, or all in a folder. Raise LightningError for a folder without one."""
    if "://" in place:
        return [StoreConfig(url=place)]
    path = Path(place).absolute()
    files = sorted(path.rglob("lightning.db")) if path.is_dir() else [path]
    if not files:
        raise LightningError(f"there is no lightning.db in {path}: name a store with --store FILE")
    return [StoreConfig(url=f"sqlite:///{file}") for file in files]


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


def _file(store: StoreConfig) -> Path:
    return store.path.expanduser().absolute()


@router.get("/readyz")
async def readyz() -> dict[str, str]:
    """There is nothing that could answer a call."""
    return {"status": "alone", "store": "ok"}


async def _page_file(request: Request) -> Response:
    return await get_file(request, request.path_params["name"])


class Stores:
    """The stores that are shown, found anew at each look at their list: a new one gets a page, too.

    It is the app below `/N`: the page of the Nth store that was opened. `idle`: the files that nobody used then.
    """

    def __init__(self, find: Callable[[], Sequence[StoreConfig]], key: str, port: int) -> None:
        self._find, self.key = find, key
        self._proxy = ProxyConfig(port=port, api_keys=[SecretStr(key)])
        self.idle: list[IdleFile] = []
        self._pages: dict[str, tuple[Dispatch, Store]] = {}  # by the store's URL
        self._stack, self._one_at_a_time = AsyncExitStack(), asyncio.Lock()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the stores open during the block."""
        async with self._stack:
            await self._look()
            yield

    async def _look(self) -> Sequence[StoreConfig]:
        """Return the stores that are there. Open new ones."""
        async with self._one_at_a_time:
            stores = await asyncio.to_thread(self._find)
            for store in stores:
                if store.url not in self._pages:
                    with suppress(LightningError):  # it is only just made: the next look opens it
                        await self._open(store)
            return [store for store in stores if store.url in self._pages]

    async def _open(self, store: StoreConfig) -> None:
        control = api_to_read(Config(store=store, proxy=self._proxy, upstreams=[_NONE]), router)
        idle = [] if store.is_postgres or is_in_use(_file(store)) else [IdleFile(_file(store))]
        await self._stack.enter_async_context(control.router.lifespan_context(control))
        self._pages[store.url] = Dispatch(control), control.state.parts.store
        self.idle += idle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pages, n = [*self._pages.values()], scope["path_params"].get("n", 0)
        page = pages[n][0] if n < len(pages) else Response(status_code=404)
        await page(scope, receive, send)

    async def listed(self, request: Request) -> Response:
        """Answer with the list of the stores."""
        if not secrets.compare_digest(request.query_params.get("key", "").encode(), self.key.encode()):
            return Response("the address that `dashboard` printed has the key", 401)
        stores, order = await self._look(), [*self._pages]
        learned = [await _learned(self._pages[store.url][1]) for store in stores]
        most = max((reward for curve, _ in learned for reward in curve), default=1.0)
        rows = [
            _row(f"{order.index(store.url)}/#/?key={self.key}", name, *one, most)
            for store, name, one in zip(stores, _names(stores), learned, strict=True)
        ]
        body = LIST.format(rows="\n".join(rows), most=f"{most:.3g}")
        return Response(body, headers=HEADERS, media_type=TYPES[".html"])


def _names(stores: Sequence[StoreConfig]) -> list[str]:
    """What tells the stores apart: files are named from the folder that they share."""
    shared = os.path.commonpath([Path(store.where).parent for store in stores if not store.is_postgres] or [Path("/")])
    return [
        store.where if store.is_postgres else os.path.relpath(store.where, shared).removesuffix("/lightning.db")
        for store in stores
    ]


async def _learned(store: Store) -> tuple[list[float], list[float]]:
    """Return mean rewards: of each training step; of eval rollouts with the first and the last version that has any."""
    steps = reversed(await store.steps.newest(STEPS))
    curve = [reward for step in steps if (reward := step.metrics.get("reward_mean")) is not None]
    earned = await store.versions.rewards([one.version for one in await store.versions.all()])
    held_out = [mean.mean for (mode, _), mean in sorted(earned.items()) if mode == "eval"]
    return curve, held_out[:1] + held_out[1:][-1:]


def _row(address: str, name: str, curve: list[float], held_out: list[float], most: float) -> str:
    heights = [1 - max(0.0, reward) / (most or 1.0) for reward in curve]
    return ROW.format(
        address=escape(address), name=escape(name), steps=len(curve), last=f"{curve[-1]:.3g}" if curve else "",
        held_out=" → ".join(f"{mean:.3g}" for mean in held_out), width=max(1, len(curve) - 1),
        points=" ".join(f"{i},{height:.4f}" for i, height in enumerate(heights)),
    )  # fmt: skip
