"""Several `lightning-proxy serve` processes with one configuration."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from contract.system import free_port
from lightning_proxy.core.config.root import Config


@asynccontextmanager
async def several(config: Config, directory: Path, count: int) -> AsyncIterator[list[str]]:
    """Run `serve` so many times, each on a port of its own; yields their addresses."""
    processes, urls = [], []
    try:
        for _ in range(count):
            settings: dict[str, Any] = config.model_dump(mode="json")
            settings["proxy"]["port"] = port = free_port()
            path = directory / f"serve-{port}.yaml"
            path.write_text(yaml.safe_dump(settings))
            argv = (sys.executable, "-m", "lightning_proxy.cli", "--config", str(path), "serve")
            processes.append(await asyncio.create_subprocess_exec(*argv))
            urls.append(f"http://127.0.0.1:{port}")
        await asyncio.gather(*map(_answers, urls, processes))
        yield urls
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in processes))


async def _answers(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/healthz"):
                    return
            if process.returncode is not None:
                break
            await asyncio.sleep(0.1)
    pytest.fail("the proxy did not start")
