"""The chat page in a real browser: what a user presses is the reward of that answer."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from playwright.async_api import Route, expect

from lightning_proxy.proxy.config.file import load_config
from lightning_proxy.trainer.collect.collector import Collector
from support.browser import browsing, needs_browser
from support.paths import ROOT
from support.rewarded import advantages
from support.rewarded_by import answers

Running = Callable[..., AbstractAsyncContextManager[Any]]
EXAMPLE = ROOT / "examples" / "thumbs"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@needs_browser
async def test_a_thumb_is_the_reward_of_its_answer(running: Running, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with running(tmp_path, rewards={"origins": [url]}, trainer={"reward_weights": {"human": 1}}) as system:
        answers(system, "Four.")
        given = os.environ | {"LIGHTNING_URL": system.url, "PORT": str(port)}
        app = await asyncio.create_subprocess_exec(
            sys.executable, EXAMPLE / "app.py", env=given, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await until_it_listens(url)
            async with browsing(url) as (page, wrong):
                for text in ("What is 2+2?", "Are you sure?"):
                    await page.get_by_label("message").fill(text)
                    await page.keyboard.press("Enter")
                    await expect(page.get_by_text(f"you: {text}")).to_be_visible()
                    await expect(page.locator("p", has_text="model: Four.").last).to_be_visible()
                await expect(page.locator("p")).to_have_count(4)
                up, down = page.get_by_label("good answer"), page.get_by_label("bad answer")
                await page.route("**/thumb", partial(away, url), times=1)
                await up.nth(0).click()  # it is sent again
                await expect(up.nth(0)).to_have_attribute("aria-pressed", "true")
                await down.nth(1).click()
                await expect(down.nth(1)).to_have_attribute("aria-pressed", "true")
                await down.nth(0).click()  # at once: it waits until a key may change its value
                await expect(down.nth(0)).to_have_attribute("aria-pressed", "true")
                await expect(up.nth(0)).to_have_attribute("aria-pressed", "false")
                system.vllm.fails = 400
                await page.get_by_label("message").fill("Why?")
                await page.keyboard.press("Enter")
                await expect(page.get_by_text("no answer: HTTP Error 400")).to_be_visible()
                await expect(page.get_by_label("message")).to_have_value("Why?")
            (rollout,) = (await system.call("GET", "/rollouts"))[1]["data"]
            found = (await system.call("GET", f"/rollouts/{rollout['rollout_id']}"))[1]
        finally:
            app.terminate()
            await app.communicate()
    assert [call["reward"] for call in found["calls"]] == [-1, -1, None]
    assert {one["name"] for one in found["rewards"]} == {"human"}
    assert [one for one in wrong.seen if f"request: {system.url}" not in one and "502" not in one] == []


async def away(origin: str, route: Route) -> None:
    await route.fulfill(status=503, headers={"Access-Control-Allow-Origin": origin})


async def until_it_listens(url: str) -> None:
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def test_a_step_takes_eight_conversations_and_each_answer_has_its_own_thumb(
    running: Running, tmp_path: Path
) -> None:
    config = load_config(EXAMPLE / "config.yaml")
    liked: dict[str, int] = {}
    async with running(tmp_path, trainer=config.trainer.model_dump(mode="json")) as system, system.store() as store:
        for n in range(8):
            for _ in range(2):
                await system.chat(f"r{n}")
            for i, call in enumerate((await system.call("GET", f"/rollouts/r{n}"))[1]["calls"]):
                value = liked[call["call_id"]] = 1 if (n + i) % 2 else -1
                reward = {"rollout_id": f"r{n}", "call_id": call["call_id"], "reward": value, "name": "human"}
                assert (await system.call("POST", "/reward", reward))[0] == 200
            await system.call("POST", f"/rollouts/r{n}/end", {"status": "completed"})
        batch = await Collector(config.trainer, store).next_batch(0)
        assert batch is not None and batch.compared == 8  # the first have too few before them to learn from
        found = advantages(batch)
        assert len(found) == 8 and all(advantage * liked[call_id] > 0 for call_id, advantage in found.items())
