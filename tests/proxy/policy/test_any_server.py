"""A vLLM of others, which has no operator routes: it is recorded, and only publishing asks for more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lightning_proxy.proxy.store.database import opened
from lightning_proxy.proxy.store.store import Store


async def test_a_vllm_without_operator_routes_answers_and_is_recorded(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path, publish="merged") as system:
        system.vllm.plain = True
        status, _ = await system.chat("r")
        assert status == 200
        _, rollout = await system.call("GET", "/rollouts/r")
        (call,) = rollout["calls"]
        assert (call["policy_version"], call["trainable"]) == (0, True)
        assert (await system.call("GET", "/v1/models"))[0] == 200
        assert (await system.call("GET", "/readyz"))[1]["status"] == "ready"


async def test_once_something_was_published_the_error_says_who_tells_what_is_missing(
    running: Any, tmp_path: Path
) -> None:
    async with running(tmp_path, publish="merged") as system:
        async with opened(system.config.store) as database:
            await system.earlier_version(Store(database), tmp_path)
        system.vllm.plain = True
        async with asyncio.timeout(20):
            while (await system.call("GET", "/readyz"))[0] != 503:
                await asyncio.sleep(0.05)
        status, answer = await system.chat("r")
        assert status == 503 and "doctor" in answer["error"]["message"]
