"""A whole proxy in this process, under a real uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from lightning_proxy.core.config.root import Config
from lightning_proxy.proxy.app import create_app


@asynccontextmanager
async def proxy_of(config: Config, wrapped: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> AsyncIterator[str]:
    """Yields its root URL. `wrapped` is given its app, and what it returns is run."""
    server = uvicorn.Server(
        uvicorn.Config(
            wrapped(create_app(config)), port=0, log_level="warning", access_log=False, timeout_keep_alive=75
        )
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
