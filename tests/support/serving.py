"""A played policy server on a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def serving(played: Any, port: int) -> AsyncIterator[Any]:
    """Serve it, and yield it."""
    runner = web.AppRunner(played.app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield played
    await runner.cleanup()
