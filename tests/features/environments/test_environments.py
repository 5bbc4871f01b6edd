"""`GET /environments`: what rollouts earned in each environment, by the rollout, by seat and by measure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from lightning_proxy.core.records import Limits
from support.browser import browsing, needs_browser

Running = Callable[..., AbstractAsyncContextManager[Any]]
HOSTILE = "<img src=x onerror=window.hurt=1>\u202e"


async def play(system: Any, name: str, task: str, environment: Any, rewards: dict[str, float], **sent: str) -> None:
    """A rollout in an environment; without rewards it failed."""
    sent |= {"X-Task-Id": task}
    note = {"kind": "note", "name": "environment", "value": environment}
    assert (await system.call("POST", f"/rollouts/{name}/events", note, **sent))[0] == 200
    posted = [{"rollout_id": name, "name": one, "reward": value, "final": False} for one, value in rewards.items()]
    assert (await system.call("POST", "/reward", posted, **sent))[0] == 200
    status = "completed" if rewards else "failed"
    assert (await system.call("POST", f"/rollouts/{name}/end", {"status": status}, **sent))[0] == 200


async def test_rewards_are_summed_up_by_environment_and_name_over_tasks(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await play(system, "a1", "a", "textarena:Game", {"reward": 1.0, "player-0": 1.0, "player-1": -1.0})
        await play(system, "a2", "a", "textarena:Game", {"reward": 0.0, "player-0": 0.0, "player-1": 0.0})
        await play(system, "b1", "b", "textarena:Game", {"reward": 0.0, "player-0": -1.0, "player-1": 1.0})
        await play(system, "b2", "b", "textarena:Game", {})
        await play(system, "c1", "c", "gcd", {"reward": 0.25}, **{"X-Rollout-Mode": "eval"})
        await play(system, "d1", "d", {"no": "name"}, {"reward": 1.0})
        _, found = await system.call("GET", "/environments")
        gcd, game = found["data"]
        assert (gcd["environment"], gcd["rewards"][0]["mean"], gcd["rewards"][0]["low"]) == ("gcd", 0.25, None)
        assert [game[name] for name in ("rollouts", "running", "failed", "tasks")] == [4, 0, 1, 2]
        assert [(one["name"], one["rollouts"], one["mean"]) for one in game["rewards"]] == [
            ("reward", 3, 0.25), ("player-0", 3, -0.25), ("player-1", 3, 0.25),
        ]  # fmt: skip
        assert (game["rewards"][0]["low"], game["rewards"][0]["high"]) == (0.0, 0.5)
        _, evaluated = await system.call("GET", "/environments?mode=eval")
        assert [one["environment"] for one in evaluated["data"]] == ["gcd"]


async def test_a_key_sees_the_environments_of_its_own_rollouts(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system, system.store() as store:
        await play(system, "a1", "a", "gcd", {"reward": 1.0}, Authorization="Bearer agent")
        key, _ = await store.keys.create("one", "agent", Limits(), recording=True, scope="own")
        while (found := await system.call("GET", "/environments", Authorization=f"Bearer {key}"))[0] == 401:
            await asyncio.sleep(0.1)
        assert found[1] == {"data": []}
        assert (await system.call("GET", "/environments", Authorization=""))[0] == 401


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
async def test_the_page_shows_environments_whatever_they_are_called(
    running: Running, tmp_path: Path, width: int
) -> None:
    size: Any = {"width": width, "height": 800}
    async with running(tmp_path) as system, browsing(f"{system.url}/#/environments", viewport=size) as (page, wrong):
        await expect(page.locator(".empty code")).to_contain_text("lightning-proxy run --environment")
        await play(system, "a1", "a", HOSTILE, {"reward": 1.0, HOSTILE: 0.5})
        await play(system, "a2", "b", HOSTILE, {})
        await page.reload()
        panel = page.locator(".panel", has_text=HOSTILE)
        await expect(panel).to_contain_text("2 rollouts of 2 tasks, 0 running, 1 failed")
        await expect(panel.get_by_role("row", name="the rollout")).to_contain_text("one task")
        await expect(panel.get_by_role("row").last).to_contain_text(HOSTILE)
        assert await page.locator("main img").count() == 0 and await page.evaluate("window.hurt") is None
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert wrong.seen == []
