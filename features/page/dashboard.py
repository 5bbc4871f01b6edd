"""`dashboard`: the page over a store alone. No proxy need run."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from pydantic import SecretStr

from ...commands.serve import UVICORN
from ...commands.system.processes import require_free_port
from ...core.config.root import Config
from ...core.config.server import ProxyConfig, StoreConfig
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import LightningError
from ...store.opening import opened
from ...store.sqlite.file import IdleFile, is_in_use

HOST = "127.0.0.1"
# A configuration needs an upstream. This one is never asked.
_NONE = UpstreamConfig(name="none", kind="openai", base_url=f"http://{HOST}:9/v1")


def dashboard(find: Callable[[], Sequence[StoreConfig]], port: int, *, is_folder: bool) -> None:
    """Serve the page until Ctrl-C. LightningError if the port is taken, or a store cannot be read.

    Whoever has the address that is printed can look: it holds a key that is made for this once. `is_folder`: `find` may
    return further stores later.
    """
    from uvicorn import Config as Settings
    from uvicorn import Server

    from .alone import create_dashboard
    from .several import create_dashboards

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
