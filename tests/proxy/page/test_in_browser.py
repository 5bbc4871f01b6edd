"""The page in a real browser, where one is there: it shows what was recorded. tests/long/test_page.py looks closer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from playwright.async_api import expect

from support.browser import browsing, needs_browser

Running = Callable[..., AbstractAsyncContextManager[Any]]


@needs_browser
async def test_a_rollout_is_seen_from_the_overview_to_its_answer(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1", X_Task_Id="t1")
        await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 0.75})
        async with browsing(system.url) as (page, wrong):
            await expect(page.locator(".stat", has_text="training rollouts")).to_contain_text("1")
            await page.keyboard.press("g")
            await page.keyboard.press("r")
            row = page.locator("tbody tr")
            await expect(row).to_contain_text("0.75")
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
            await expect(page.locator(".call")).to_contain_text("by base with")
        assert wrong.seen == []
