"""The page shows the test of a version as its evidence grows, and how it ended, by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from lightning_proxy.features.promotion import gate
from support.browser import browsing, needs_browser

pytestmark = needs_browser
Running = Callable[..., AbstractAsyncContextManager[Any]]


async def rewarded(system: Any, tasks: range, version: int) -> None:
    """Groups of four, in which the candidate earns nothing."""
    for rollout, task in ((f"t{task}-{i}", f"t{task}") for task in tasks for i in range(4)):
        await system.chat(rollout, X_Task_Id=task)
        _, detail = await system.call("GET", f"/rollouts/{rollout}")
        reward = float(detail["calls"][0]["policy_version"] != version)
        await system.call("POST", "/reward", {"rollout_id": rollout, "reward": reward})


async def test_the_page_shows_the_evidence_as_it_grows(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LOOK_S", 0.05)
    policy = {"promotion": "gated", "gate": {"metrics": {"reward": 0.1, "answer_tokens": 0.2}}}
    async with running(tmp_path, publish="lora", policy=policy, trainer={"group_size": 4}) as system:
        async with system.store() as store:
            version = await system.candidate(store, tmp_path)
        async with browsing(system.url) as (page, wrong):
            await page.goto(f"{system.url}/#/versions")
            await expect(page.locator("main")).to_contain_text(f"Version {version} is tested against 0")
            await rewarded(system, range(2), version)
            evidence = page.get_by_role("region", name="Evidence")
            await expect(evidence.locator("tr", has_text="reward")).to_contain_text("−1.00")
            await expect(evidence.locator("tr", has_text="answer_tokens")).to_contain_text("undecided")
            await page.screenshot(path=tmp_path / "under-way.png")
            await rewarded(system, range(2, 12), version)
            await expect(page.locator("tr", has_text="rejected")).to_contain_text("reward is worse")
            await expect(page.locator("main")).not_to_contain_text("is tested against")
            await page.screenshot(path=tmp_path / "decided.png")
        assert wrong.seen == []
