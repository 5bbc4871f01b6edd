"""Evaluations on the page, in a real browser: each version's result, the best one, the curve."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from playwright.async_api import expect

from lightning_proxy.features.evaluation.evaluations import Evaluations
from support.views import browsing, needs_browser

Running = Callable[..., AbstractAsyncContextManager[Any]]
HOSTILE = "<img src=x onerror=window.hurt=1>"
RESULTS = [(0.30, None), (0.42, 0.12), (0.58, 0.28)]


async def evaluated(system: Any, directory: Path) -> None:
    """The base model and two versions with results, and one with an evaluation that failed."""
    async with system.store() as store:
        evaluations = Evaluations(store)
        for step in (1, 2, 3):
            version = await store.versions.new("merged", step, {})
            (directory / f"v{version}").mkdir(exist_ok=True)
            await store.versions.saved(version, str(directory / f"v{version}"), "base")
            await store.versions.set_live(version, step, verified=True)
        for version, (reward, above) in enumerate(RESULTS):
            found = {"reward": reward, "low": reward - 0.06, "high": reward + 0.06}
            if above is not None:
                found |= {"difference": above, "difference_low": above - 0.05, "difference_high": above + 0.05}
            await evaluations.begin(version, version)
            await evaluations.ended(version, **found)
        await evaluations.begin(3, 3)
        await evaluations.ended(3, error=HOSTILE)


@needs_browser
async def test_each_version_is_seen_with_its_interval_and_the_best_is_named(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await evaluated(system, tmp_path)
        async with browsing(f"{system.url}/#/versions") as (page, wrong):
            for shown in ("0.58 0.52 to 0.64, +0.28 above the first", "best"):
                await expect(page.get_by_role("row", name="2 ready")).to_contain_text(shown)
            await expect(page.get_by_role("row", name="3 live")).to_contain_text(HOSTILE)
            await expect(page.get_by_label("Reward by policy version, 3 versions. Last: eval 0.58.")).to_be_visible()
            assert await page.locator("main img").count() == 0 and await page.evaluate("window.hurt") is None
        assert (wrong.seen, wrong.refused) == ([], [])
