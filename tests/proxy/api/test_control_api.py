"""The control API over HTTP, with a real store; vLLM's operator routes are played by `PolicyServer`."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_a_vllm_that_stays_away_is_told_of_once(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(dict[str, str]):
        asked = 0

        def items(self) -> Any:
            Broken.asked += 1
            raise OSError("broken")

    monkeypatch.setattr("lightning_proxy.proxy.gateway.routing.WATCH_S", 0.01)
    async with running(tmp_path) as system:
        system.vllm.adapters = Broken()
        while Broken.asked < 5:
            await asyncio.sleep(0.01)
        records = [record for record in caplog.records if record.name == "lightning_proxy.proxy.gateway.routing"]
        told = [record.getMessage() for record in records]
    assert len(told) == 1, told
