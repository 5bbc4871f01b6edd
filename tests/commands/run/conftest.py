"""A control API for the tests of `run`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from support.control_api import ControlApi


@pytest.fixture
async def proxy() -> AsyncIterator[ControlApi]:
    api = ControlApi()
    runner = web.AppRunner(api.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    await runner.cleanup()
