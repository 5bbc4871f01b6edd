"""The page in a real browser, where one is there: keys, a chart. tests/long/test_page.py looks closer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from playwright.async_api import expect

from support.views import browsing, needs_browser

pytestmark = needs_browser
Running = Callable[..., AbstractAsyncContextManager[Any]]


async def test_a_rollout_is_seen_from_the_overview_to_its_answer(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1", X_Task_Id="t1")
        await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 0.75})
        async with browsing(system.url) as (page, wrong):
            await expect(page.locator(".stat", has_text="training rollouts")).to_contain_text("1")
            await page.get_by_role("link", name="rollouts").click()
            row = page.get_by_role("row", name="r1")
            await expect(row).to_contain_text("0.75")
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
            await expect(page.locator(".call")).to_contain_text("by base with")
        assert wrong.seen == []


async def test_axes_of_rewards_begin_at_0_and_a_single_version_has_its_place(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        for name, reward in (("r1", 0.0435), ("r2", 0.0455)):
            await system.chat(name, X_Task_Id="t1")
            await system.call("POST", "/reward", {"rollout_id": name, "reward": reward})
        async with browsing(system.url) as (page, wrong):
            chart = page.get_by_label("Reward by policy version,")
            await expect(chart.locator(".y.tick")).to_have_text(["0", "0.01", "0.02", "0.03", "0.04"])
            await expect(chart.locator(".x.tick")).to_have_text(["0"])
            await chart.locator(".plot").hover()
            await expect(chart.locator("figcaption")).to_have_text("version 0train 0.0445")
        assert wrong.seen == []
