"""The command `dashboard` over a store, as a process."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from contract.system import free_port


@asynccontextmanager
async def dashboard(store: Path | str, where: str | None = None) -> AsyncIterator[tuple[str, str]]:
    """Its address and its key. `where`: the store as it is shown."""
    argv = (sys.executable, "-m", "lightning_proxy", "dashboard", "--store", str(store), "--port", str(free_port()))
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        said = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        found = re.search(r"(http://[^/]+)/#/\?key=(\S+)", said)
        assert found is not None and said.startswith(f"{where or store}: "), said
        async with aiohttp.ClientSession(headers={"Connection": "close"}) as session:
            while True:
                try:
                    async with session.get(f"{found[1]}/readyz") as answer:
                        assert (await answer.json())["status"] == "alone"
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.1)
        yield found[1], found[2]
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 0
