"""The page's views over a history of learning, and what each of them shows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Page, expect

from .learning import Learning

Running = Callable[..., AbstractAsyncContextManager[Any]]

STEPS = 6
HREFS = "all => all.map(one => one.getAttribute('href'))"
VIEWS = {
    "overview": "Reward by training step",
    "rollouts": "run-005-3-3",
    "rollouts/run-004-2-1": "Trained in step 5",
    "rollouts/run-004-2-1/rows": "Rows of this rollout",
    "rollouts/run-004-2-1/beside": "side by side",
    "tasks": "multiply-00",
    "versions": "Version 6 is live",
    "compare?a=0&b=5": "paired tasks",
    "costs": "Calls by day",
    "environments": "reasoning_gym:sums",
    "rate": "Say who you are",
    "evaluations": "mean of all eval rollouts",
    "prompts": "No prompts yet",
    "rewarders": "What a reward counts for in training",
}


@asynccontextmanager
async def learned(running: Running, directory: Path, **proxy: Any) -> AsyncIterator[Any]:
    """A system whose policy learned in a few steps."""
    headers = {"Authorization": "Bearer agent"} if proxy else {}
    async with running(directory, **proxy) as system, system.store() as store:
        learning = Learning(system, store, headers)
        for number in range(STEPS):
            await learning.step(number, STEPS, directory)
        yield system


async def every(page: Page, system: Any) -> list[str]:
    """Those of VIEWS, and whatever else the page's navigation leads to."""
    await page.goto(system.url)
    links = page.locator("nav a[href^='#/']")
    await expect(links.first).to_be_attached()  # on a phone they are folded
    return [*dict.fromkeys([*VIEWS, *(href.removeprefix("#/") for href in await links.evaluate_all(HREFS))])]


async def show(page: Page, system: Any, view: str) -> None:
    await page.goto(f"{system.url}/#/{view}")
    await page.reload()
    await expect(page.locator(".loading")).to_have_count(0)
