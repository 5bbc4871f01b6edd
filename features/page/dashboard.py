"""`dashboard`: serves the page for a store, without a proxy and without writing."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

import typer
import uvicorn
from fastapi import APIRouter
from pydantic import SecretStr

from ...commands.serve import UVICORN
from ...commands.system.processes import require_free_port
from ...core.config.root import Config
from ...core.config.server import ProxyConfig, StoreConfig
from ...core.config.upstreams import UpstreamConfig
from ...core.errors import LightningError
from ...proxy.app import Dispatch, api_to_read
from ...store.sqlite.file import IdleFile, is_in_use

HOST = "127.0.0.1"
LOOK_S = 0.5
# A configuration needs an upstream. This one is never asked.
_NONE = UpstreamConfig(name="none", kind="openai", base_url=f"http://{HOST}:9/v1")
router = APIRouter()


@router.get("/readyz")
async def readyz() -> dict[str, str]:
    """Answers with HTTP 200 and the status `alone`, which tells the page that nothing here answers calls."""
    return {"status": "alone", "store": "ok"}


def dashboard(store: StoreConfig, port: int) -> None:
    """Serve the page until Ctrl-C, at an address that contains a key.

    Raises LightningError if there is no store, the port is taken, or somebody begins to write to an idle store file.
    """
    file = None if store.is_postgres else store.path.expanduser().absolute()
    if file is not None and not file.is_file():
        raise LightningError(f"there is no store at {file}: name one with --store FILE")
    require_free_port(HOST, port, "--port")
    # SQLite reads a file that nobody uses as one that does not change: it is watched.
    idle = None if file is None or is_in_use(file) else IdleFile(file)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(store, port, idle))
    if idle is not None and idle.is_written():
        raise LightningError(f"{file} was changed, so the page would be out of date: start the dashboard again")


async def _serve(store: StoreConfig, port: int, idle: IdleFile | None) -> None:
    key = secrets.token_urlsafe(16)
    proxy = ProxyConfig(port=port, api_keys=[SecretStr(key)])
    control = api_to_read(Config(store=store, proxy=proxy, upstreams=[_NONE]), router)
    server = uvicorn.Server(uvicorn.Config(Dispatch(control), host=HOST, port=port, lifespan="off", **UVICORN))
    async with control.router.lifespan_context(control):
        typer.echo(f"{store.where}: http://{HOST}:{port}/#/?key={key}")
        typer.echo("Ctrl-C stops. Nothing is written to the store.", err=True)
        serving = asyncio.create_task(server.serve())
        with suppress(asyncio.CancelledError):  # uvicorn, having ended, raises Ctrl-C again
            while not (await asyncio.wait([serving], timeout=LOOK_S))[0]:
                server.should_exit |= idle is not None and idle.is_written()
