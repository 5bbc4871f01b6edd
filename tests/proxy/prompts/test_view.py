"""The page's view of prompts in a real browser: versions, their test, texts side by side, and the rollouts behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from playwright.async_api import expect

from lightning_proxy.proxy.prompts.prompt_tests import PromptTests
from support.browser import browsing, needs_browser

Running = Callable[..., AbstractAsyncContextManager[Any]]
HOSTILE = "<img src=x onerror=window.hurt=1>"
OWN = f"You are a writer.\nBe brief.\n{HOSTILE}"
BETTER = f"You are a careful writer.\nBe brief.\nCount your words. {HOSTILE}"
REWARD = {
    "margin": 0.1, "pairs": 24, "difference": 0.21, "interval": [0.05, 0.37], "e_drop": 0.1, "e_safe": 31.0,
    "verdict": "safe", "clipped": 0, "live": 0.4, "candidate": 0.61,
}  # fmt: skip
SIDE = {"rollouts": 48, "counted": 48, "failed": 1, "unrewarded": 0}
EVIDENCE = {
    "rollouts": 96, "max_rollouts": 2000, "level": 0.05, "groups": 24, "candidate": SIDE, "live": SIDE,
    "metrics": {"reward": REWARD},
}  # fmt: skip


async def in_a_test(system: Any) -> None:
    """A prompt with two versions, the second of which is tested, and a rollout that kept it."""
    own = {"name": "writer", "text": OWN, "match": {"agent": "writer"}}
    better = {"name": "writer", "text": BETTER, "parent": 1, "comment": HOSTILE, "metrics": {HOSTILE: 0.5}}
    for body in (own, better):
        assert (await system.call("POST", "/prompts", body))[0] == 200
    body = {"task_id": "t1", "prompts": {"writer": 2}}
    for reward in (1.0, 0.5, 0.75):
        _, (opened,) = await system.call("POST", "/rollouts", body)
        posted = {"rollout_id": opened["rollout_id"], "reward": reward}
        assert (await system.call("POST", "/reward", posted))[0] == 200
    async with system.store() as store:
        await PromptTests(store.database).begin("writer", 2)
        (test,) = await PromptTests(store.database).under_way()
        await PromptTests(store.database).found(test, EVIDENCE)


@needs_browser
async def test_a_version_is_seen_with_its_test_its_text_and_its_rollouts(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, browsing(f"{system.url}/#/prompts") as (page, wrong):
        await expect(page.locator(".empty code")).to_have_text("lightning-proxy prompts add NAME FILE")
        await in_a_test(system)
        await page.reload()
        row = page.get_by_role("row", name="version 2")
        for shown in ("testing", "0.75 of 3", "+0.21 +0.05 to +0.37"):
            await expect(row).to_contain_text(shown)
        await expect(page.locator("main")).to_contain_text("Version 2 is tested against 1")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await expect(page.locator("ins")).to_have_text(
            ["You are a careful writer.\n", f"Count your words. {HOSTILE}\n"]
        )
        assert await page.locator(".beside pre").last.text_content() == f"{BETTER}\n"
        await expect(page.locator("del")).to_have_text(["You are a writer.\n", f"{HOSTILE}\n"])
        await expect(page.get_by_role("region", name="Rollouts").locator("tbody tr")).to_have_count(3)
        await expect(page.locator(".facts")).to_contain_text(f"comment{HOSTILE}")
        assert await page.locator("main img").count() == 0 and await page.evaluate("window.hurt") is None
        assert (wrong.seen, wrong.refused) == ([], [])


async def test_the_rollouts_that_kept_a_version_say_whether_they_are_evidence(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, prompts={"promotion": "gated"}) as system:
        for text in (OWN, BETTER):
            body = {"name": "writer", "text": text, "match": {"agent": "writer"}, "promote": True}
            assert (await system.call("POST", "/prompts", body))[0] == 200
        _, opened = await system.call("POST", "/rollouts", {"task_id": "t1", "n": 4})
        for one in opened:
            await system.call("GET", "/prompts/writer", None, X_Rollout_Id=one["rollout_id"])
            posted = {"rollout_id": one["rollout_id"], "reward": 1.0}
            assert (await system.call("POST", "/reward", posted))[0] == 200
        _, (beside,) = await system.call("POST", "/rollouts", {"task_id": "t2", "prompts": {"writer": 2}})
        counts = {}
        for version in (1, 2):
            _, found = await system.call("GET", f"/prompts/writer/versions/{version}/rollouts")
            counts |= {row["rollout_id"]: (row["task_id"], row["counts"]) for row in found["data"]}
        assert counts == {one["rollout_id"]: ("t1", True) for one in opened} | {beside["rollout_id"]: ("t2", False)}
        assert (await system.call("GET", "/prompts/writer/versions/3/rollouts"))[0] == 404
