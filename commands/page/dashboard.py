"""`dashboard`: the page over a store alone. No proxy need run."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from pydantic import SecretStr

from ...proxy.config.root import Config
from ...proxy.config.server import ProxyConfig, StoreConfig
from ...proxy.config.upstreams import UpstreamConfig
from ...proxy.errors import LightningError
from ...proxy.store.opening import opened
from ...proxy.store.sqlite.copies import is_in_use
from ..serve import UVICORN
from ..system.processes import require_free_port

HOST = "127.0.0.1"
# A configuration needs an upstream. This one is never asked.
_NONE = UpstreamConfig(name="none", kind="openai", base_url=f"http://{HOST}:9/v1")


def dashboard(store: StoreConfig, port: int) -> None:
    """Serve the page until Ctrl-C. LightningError if the port is taken, or there is no store that can be read.

    Whoever has the address that is printed can look: it holds a key that is made for this once.
    """
    from uvicorn import Config as Settings
    from uvicorn import Server

    from ...proxy.page.dashboard import create_dashboard

    path = None if store.is_postgres else store.path.expanduser().absolute()
    if path is not None and not path.is_file():
        raise LightningError(f"there is no store at {path}: name one with --store FILE")
    asyncio.run(_require_readable(store))
    require_free_port(HOST, port, "--port")
    key = secrets.token_urlsafe(16)
    config = Config(store=store, proxy=ProxyConfig(port=port, api_keys=[SecretStr(key)]), upstreams=[_NONE])
    server = Server(Settings(create_dashboard(config), host=HOST, port=port, **UVICORN))
    typer.echo(f"{store.where}: http://{HOST}:{port}/#/?key={key}")
    typer.echo("Ctrl-C stops. Nothing is written to the store.", err=True)
    idle = None if path is None or is_in_use(path) else IdleFile(path)  # a PostgreSQL server notifies of changes
    if idle is not None:
        threading.Thread(target=_end_when_written, args=(idle, server), daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run()
    if idle is not None and idle.is_written():
        raise LightningError(f"{path} is in use again, so the page would be out of date: start the dashboard again")


class IdleFile:
    """A file that nobody used was opened as one that does not change. Others may read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._was = self._now()

    def is_written(self) -> bool:
        """Return whether anything was written to the file, or to SQLite's log beside it."""
        return self._now() != self._was

    def _now(self) -> tuple[int, ...]:
        log = self._path.with_name(f"{self._path.name}-wal")
        with suppress(OSError):  # removed
            file = self._path.stat()
            return file.st_ino, file.st_size, file.st_mtime_ns, log.stat().st_size if log.exists() else 0
        return ()


def _end_when_written(file: IdleFile, server: Any) -> None:
    while not server.should_exit:
        time.sleep(0.5)
        server.should_exit = server.should_exit or file.is_written()


async def _require_readable(store: StoreConfig) -> None:
    """Raise StoreUnavailable."""
    async with opened(store, to_write=False):
        pass
