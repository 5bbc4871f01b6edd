"""`GET /machine` and `GET /plugins`, and their views: what the machine does, and what is on board."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Route, expect

from lightning_proxy.commands.plan import keep_plan
from lightning_proxy.proxy.config.root import Config
from lightning_proxy.proxy.machine.board import _package_of, _source_of, _training
from lightning_proxy.proxy.machine.hardware import kept_plan
from lightning_proxy.proxy.machine.servers import numbers
from lightning_proxy.proxy.types import Limits
from lightning_proxy.trainer.plan.machine import cards_like
from lightning_proxy.trainer.plan.memory import GIB
from lightning_proxy.trainer.plan.settle import settle
from support.browser import browsing, needs_browser
from support.model_sizes import SIZES
from support.sections import TrainerConfig

Running = Callable[..., AbstractAsyncContextManager[Any]]
HOSTILE = "<img src=x onerror=window.hurt=1>\u202e"
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="a b"} 2.0
vllm:num_requests_running{engine="1",model_name="a b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 0.5
vllm:generation_tokens_total{engine="0",model_name="a b"} 1.5e+03
vllm:generation_tokens_created{engine="0",model_name="a b"} 1.7e+09
"""


def test_numbers_of_vllms_metrics() -> None:
    """Those of several engines are added up; what it does not say is None."""
    assert numbers(METRICS) == {
        "running": 3, "waiting": 5, "read_tokens": None, "sampled_tokens": 1500, "cache": 0.5
    }  # fmt: skip


async def test_the_machine_says_what_waits_and_how_full_it_is(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1", X_Task_Id="t1")
        for name in ("r2", "r3"):
            await system.chat(name, X_Task_Id="t1")
            await system.call("POST", f"/rollouts/{name}/end", {"status": "completed"})
        await system.call("POST", "/reward", {"rollout_id": "r3", "reward": 1.0})
        _, found = await system.call("GET", "/machine")
        waits = found["waiting"]
        assert [waits[name] for name in ("running", "for_reward", "groups", "complete")] == [1, 1, 1, 1]
        (memory, *_), (disk, *_) = found["memory"], found["disks"]
        assert "store" in disk["of"]
        assert all(0 < room["used"] < room["total"] for room in (memory, disk))
        (server,) = found["servers"]
        assert "404" in server["problem"], "the played vLLM has no metrics"
        assert found["plan"] is None


def test_the_plan_that_up_keeps_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES["Qwen3-4B"]))
    policy = {"model": str(tmp_path), "publish": "lora", "directory": tmp_path / "policy"}
    found = settle(Config.model_validate({"policy": policy}), cards_like("1x24"))
    keep_plan(found)
    kept, file = kept_plan(found.config.policy), found.config.policy.plan_file
    assert kept is not None and found.plan is not None
    assert kept["trainer"] == {name: round(size / GIB, 2) for name, size in found.plan.trainer.items()}
    file.write_text('{"vllm_gib": 1')
    assert kept_plan(found.config.policy) is None
    keep_plan(replace(found, plan=None))
    assert not file.exists()


async def test_a_key_of_its_own_rollouts_sees_no_machine(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system, system.store() as store:
        key, _ = await store.keys.create("one", "agent", Limits(), recording=True, scope="own")
        for route in ("/machine", "/plugins"):
            while (found := await system.call("GET", route, Authorization=f"Bearer {key}"))[0] == 401:
                await asyncio.sleep(0.1)
            assert found[0] == 403
            assert (await system.call("GET", route, Authorization="Bearer agent"))[0] == 200


async def test_the_board_lists_upstreams_training_and_rooms(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        async with asyncio.timeout(10):  # until its server was first asked
            while (found := (await system.call("GET", "/plugins"))[1])["upstreams"][0]["state"] == "unknown":
                await asyncio.sleep(0.05)
        (upstream,) = found["upstreams"]
        assert (upstream["kind"], upstream["state"], upstream["problem"]) == ("vllm", "up", None)
        assert {one["what"]: one["name"] for one in found["training"]} == {
            "credit": "uniform", "baseline": "grpo", "loss": "cispo"
        }  # fmt: skip
        assert {one["package"] for one in found["training"]} == {"lightning-proxy"}
        assert {"name": "costs", "about": "Says what calls used and cost"} in (found["rooms"])
        assert found["plugins"] == []


def test_a_function_of_ones_own_is_from_its_file_or_package() -> None:
    assert _source_of("credit.py:mine") == {"package": "credit.py", "version": None}
    assert _training(TrainerConfig(credit="credit.py:mine")) == [("credit", "credit.py:mine"), ("loss", "cispo")]
    assert _package_of("no-such-plugin") == {"package": "no-such-plugin", "version": None}


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
async def test_the_page_shows_the_machine_and_the_board_whatever_they_say(
    running: Running, tmp_path: Path, width: int
) -> None:
    asked = 0

    async def machine(route: Route) -> None:
        nonlocal asked
        asked += 1
        answer = await (await route.fetch()).json()
        said = {"server": HOSTILE, "running": 3, "waiting": 2, "cache": 0.5, "problem": None}
        answer |= {"at": float(asked), "plan": {"vllm": {"weights": 3.0}, "trainer": {HOSTILE: 2.0}}}
        answer["servers"] = [{**said, "read_tokens": 1000 * asked, "sampled_tokens": 40 * asked}]
        await route.fulfill(json=answer)

    async def board(route: Route) -> None:
        answer = await (await route.fetch()).json()
        plugin = {"what": "plugin", "name": HOSTILE, "package": HOSTILE, "version": HOSTILE}
        answer["upstreams"][0] |= {"upstream": HOSTILE, "state": "down", "problem": HOSTILE}
        await route.fulfill(json=answer | {"plugins": [plugin], "training": [plugin]})

    size: Any = {"width": width, "height": 800}
    async with running(tmp_path) as system, browsing(f"{system.url}/#/machine", viewport=size) as (page, wrong):
        await expect(page.locator(".empty code").first).to_be_visible()
        await page.route(re.compile(r"/machine$"), machine)
        await page.route(re.compile(r"/plugins$"), board)
        await page.clock.install()
        await page.reload()
        panel = page.locator(".panel", has_text=HOSTILE).last
        await expect(panel).to_contain_text("40 since its start")
        await page.clock.run_for(5_000)  # until it looks again
        await expect(panel).to_contain_text("40 tokens / s")
        await expect(panel).to_contain_text("1,000 tokens / s")
        await expect(page.get_by_role("row", name="together")).to_contain_text("3")
        await page.goto(f"{system.url}/#/plugins")
        await expect(page.locator(".panel", has_text="Upstreams").first).to_contain_text(HOSTILE)
        assert await page.locator("main img").count() == 0 and await page.evaluate("window.hurt") is None
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert wrong.seen == []
