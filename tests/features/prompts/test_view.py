"""The page's view of prompts in a real browser: versions, texts side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from playwright.async_api import expect

from support.views import browsing, needs_browser

Running = Callable[..., AbstractAsyncContextManager[Any]]
HOSTILE = "<img src=x onerror=window.hurt=1>"
OWN = f"You are a writer.\nBe brief.\n{HOSTILE}"
BETTER = f"You are a writer.\nBe brief.\nCount your words. {HOSTILE}"


async def two_versions(system: Any) -> None:
    """A prompt with two versions, and rollouts that kept the second one."""
    own = {"name": "writer", "text": OWN, "match": {"agent": "writer"}}
    better = {"name": "writer", "text": BETTER, "parent": 1, "comment": HOSTILE, "metrics": {HOSTILE: 0.5}}
    for body in (own, better):
        assert (await system.call("POST", "/prompts", body))[0] == 200
    body = {"task_id": "t1", "prompts": {"writer": 2}}
    for reward in (1.0, 0.5, 0.75):
        _, (opened,) = await system.call("POST", "/rollouts", body)
        posted = {"rollout_id": opened["rollout_id"], "reward": reward}
        assert (await system.call("POST", "/reward", posted))[0] == 200


@needs_browser
async def test_a_version_is_seen_with_its_text_and_its_rollouts(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, browsing(f"{system.url}/#/prompts") as (page, wrong):
        await expect(page.locator(".empty code")).to_have_text("lightning-proxy prompts add NAME FILE")
        await two_versions(system)
        await page.reload()
        await expect(page.get_by_role("row", name="version 2")).to_contain_text("0.75 of 3")
        await expect(page.get_by_role("row", name="version 1")).to_contain_text("live")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await expect(page.locator("ins")).to_have_text(f"Count your words. {HOSTILE}\n")
        assert await page.locator(".two pre").last.text_content() == f"{BETTER}\n"
        await expect(page.locator("del")).to_have_text(f"{HOSTILE}\n")
        await expect(page.locator(".facts")).to_contain_text(f"comment{HOSTILE}")
        assert await page.locator("main img").count() == 0 and await page.evaluate("window.hurt") is None
        assert (wrong.seen, wrong.refused) == ([], [])
