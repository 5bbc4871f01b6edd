"""Serves a second proxy, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ....core.config.root import Config
from ....core.errors import LightningError
from ...serve import uvicorn_options

POLL_S = 0.05


@asynccontextmanager
async def served(config: Config) -> AsyncIterator[None]:
    """Serve the proxy of this configuration until the block is left."""
    from uvicorn import Config as Settings
    from uvicorn import Server

    from ....proxy.app import create_app

    server = Server(Settings(create_app(config), loop="asyncio", **uvicorn_options(config.proxy)))
    thread = threading.Thread(target=server.run, daemon=True)  # signals are this process's own
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise LightningError("the second proxy could not start; see the lines above")
            await asyncio.sleep(POLL_S)
        yield
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join)
