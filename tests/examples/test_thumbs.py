"""The chat page in a real browser: what a user presses is the reward of that answer."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
from playwright.async_api import expect

from lightning_proxy.proxy.config.file import load_config
from support.browser import browsing, needs_browser
from support.paths import ROOT
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
                await up.nth(0).click()
                await expect(up.nth(0)).to_have_attribute("aria-pressed", "true")
                await down.nth(1).click()
                await expect(down.nth(1)).to_have_attribute("aria-pressed", "true")
                await down.nth(0).click()  # at once: it waits until a key may change its value
                await expect(down.nth(0)).to_have_attribute("aria-pressed", "true")
                await expect(up.nth(0)).to_have_attribute("aria-pressed", "false")
            (rollout,) = (await system.call("GET", "/rollouts"))[1]["data"]
            found = (await system.call("GET", f"/rollouts/{rollout['rollout_id']}"))[1]
        finally:
            app.terminate()
            await app.communicate()
    assert [call["reward"] for call in found["calls"]] == [-1, -1]
    assert {one["name"] for one in found["rewards"]} == {"human"}
    assert [one for one in wrong.seen if not one.startswith(f"request: {system.url}")] == []


async def until_it_listens(url: str) -> None:
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


def test_its_configuration_is_valid() -> None:
    config = load_config(EXAMPLE / "config.yaml")
    assert config.trainer.reward_weights == {"human": 1}
