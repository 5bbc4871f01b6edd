"""The task that writes records ends by a fault: nobody waits for it, and `/readyz` says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.proxy.gateway import recorder


async def test_calls_are_refused_and_the_proxy_is_not_ready(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of the writer's own")

    async with running(tmp_path) as system:
        assert (await system.chat("before"))[0] == 200
        with monkeypatch.context() as patched:
            settle, told = recorder._settle, []
            patched.setattr(recorder, "_settle", lambda *a: settle(*a) if told else (told.append(1), broken()))
            async with asyncio.timeout(20):
                answers = await asyncio.gather(*(system.chat(f"r{n}") for n in range(3)))
        assert {status for status, _ in [*answers, await system.chat("after")]} == {503}
        status, view = await system.call("GET", "/readyz")
        assert status == 503 and "records are not written any more: a fault of the writer's own" in view["store"]
    assert "start the proxy again" in caplog.text
