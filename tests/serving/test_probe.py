"""Whether the policy's server still answers as the live version did, whatever its label says."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lightning_proxy.proxy.gateway import routing
from lightning_proxy.proxy.gateway.routing import difference


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(routing, "LOOK_S", 0.02)
    monkeypatch.setattr(routing, "PROBE_S", 0.05)
    yield


def completions(vllm: Any) -> Any:
    """The route of a played vLLM that answers by its weights alone, as a seed makes a real one do."""

    async def complete(_: web.Request) -> web.Response:
        likely = -0.1 - 3 * (len(Path(vllm.weights).name) % 7)
        top = {"token_id:5": likely, "token_id:6": -9.0}
        logprobs = {"tokens": ["token_id:5"] * 2, "top_logprobs": [top] * 2}
        return web.json_response({"choices": [{"logprobs": logprobs}]})

    return complete


async def until_it_says(system: Any, status: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (view := (await system.call("GET", "/readyz"))[1])["status"] != status:
            await asyncio.sleep(0.02)
    return dict(view)


async def probe_ok(system: Any) -> str:
    async with system.session.get(system.url + "/metrics") as answer:
        return re.findall(r"^lightning_policy_probe_ok (\S+)$", await answer.text(), re.M)[0]


async def test_weights_that_were_replaced_behind_our_back_are_noticed(running: Any, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.app._frozen = False
        system.vllm.app.router._frozen = False
        system.vllm.app.router.add_post("/v1/completions", completions(system.vllm))
        await until_it_says(system, "ready")
        await asyncio.sleep(0.3)  # it was asked for the first time
        _, out, _ = await system.lightning("status")
        assert re.search(r"probed +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC, .*s ago: it answers as at first", out)
        theirs, system.vllm.weights = system.vllm.weights, "/tmp/of-somebody-else"
        assert "version 0 did: its log-probabilities differ by" in (await until_it_says(system, "degraded"))["policy"]
        _, answer = await system.call("GET", "/status")
        assert "version 0 did: its log-probabilities differ by" in answer["verified"]["problem"]
        assert await probe_ok(system) == "0.0"
        system.vllm.weights = theirs
        assert "policy" not in await until_it_says(system, "ready")
        assert await probe_ok(system) == "1.0"
        back = time.time()
        async with asyncio.timeout(20):
            while (await system.call("GET", "/status"))[1]["verified"]["probed_at"] < back:
                await asyncio.sleep(0.02)


async def test_an_adapter_that_was_replaced_under_its_name_is_loaded_again(
    running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, publish="lora") as system:
        async with system.store() as store:
            version = await system.earlier_version(store, tmp_path, ["helper"])
        await system.call("POST", "/policy/promote", {"version": version})
        right = dict(system.vllm.adapters)
        assert right == {"policy-v1": str(tmp_path / "v1"), "policy-v1.helper": str(tmp_path / "v1" / "helper")}
        for name in right:
            system.vllm.adapters[name] = "/tmp/of-somebody-else"
            async with asyncio.timeout(20):
                while system.vllm.adapters != right:
                    await asyncio.sleep(0.02)
    assert caplog.text.count("vLLM does not serve policy version 1: loading it again") == 2


def test_answers_are_compared_as_long_as_the_same_tokens_came_before() -> None:
    one: list[Any] = [("a", {"a": -0.1, "b": -2.0}), ("a", {"a": -0.3}), ("b", {"b": -0.2})]
    assert difference(one, one) == 0
    moved: list[Any] = [("a", {"a": -0.2, "b": -2.2}), ("b", {"a": -0.6}), ("b", {"b": -8.0})]
    assert difference(one, moved) == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert difference(one, [("c", {"c": -0.1})]) == math.inf
    assert math.isnan(difference([], one))
