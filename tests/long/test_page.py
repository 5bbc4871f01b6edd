"""The page in a real browser: filters, login, the feed, hostile texts, axe and keyboard on every view, one phone."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from lightning_proxy.core.records import Reward, RolloutName
from support.views import ELEMENT, STEPS, VIEWS, browsing, every, learned, needs_browser, say_everything, show

pytestmark = needs_browser


async def test_rollouts_are_filtered_and_sorted_and_the_address_says_how(start: Any) -> None:
    async with learned(start) as system, browsing(system.url) as (page, wrong):
        await show(page, system, "rollouts")
        await page.keyboard.press("/")
        await page.keyboard.type("no such words")
        await page.keyboard.press("Enter")
        await expect(page.locator(".empty")).to_contain_text("No rollout is like that")
        await page.get_by_role("link", name="Show all rollouts").click()
        await page.locator("select[name=mode]").select_option("eval")
        await expect(page).to_have_url(re.compile(r"#/rollouts\?mode=eval$"))
        await expect(page.locator("tbody tr")).to_have_count(4 * STEPS)
        await page.get_by_role("button", name="reward").click()
        rewards = [float(text) for text in await page.locator("tbody td:nth-child(2)").all_text_contents()]
        assert rewards == sorted(rewards, reverse=True)
        await page.go_back()
        await expect(page.locator("tbody tr")).to_have_count(100)
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await expect(page.locator(".call").first).to_contain_text("What is 17*23+4?")
        await page.keyboard.press("u")
        await page.get_by_role("link", name="Show older rollouts").click()
        await expect(page.locator("tbody tr")).to_have_count(20 * STEPS - 100)
        assert wrong == []


async def test_the_first_paint_comes_within_a_second_with_ten_thousand_rollouts(start: Any) -> None:
    async with start() as system, system.store() as store:
        names = [f"r{i}" for i in range(10_000)]
        await store.rollouts.open([(RolloutName(name, f"t{i % 200}"), name) for i, name in enumerate(names)], {})
        await store.rewards.post([Reward(name, 0.5) for name in names])
        for number in range(1000):
            step = await store.steps.claim(names[10 * number : 10 * number + 10], 0)
            await store.steps.trained(step, None, {"reward_mean": number / 1000, "reward_std": 0.1, "entropy": 1.0})
        for view, drawn in (("overview", "main .line"), ("rollouts", "tbody tr"), ("tasks", "tbody tr")):
            async with browsing("about:blank") as (page, _):
                await page.goto(f"{system.url}/#/{view}")
                await page.locator(drawn).first.wait_for()
                paint = await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            assert paint < 1000, view


async def test_the_feed_goes_on_from_its_cursor(start: Any) -> None:
    asked: list[str] = []

    async def end_at_once(route: Any) -> None:
        asked.append(route.request.url.partition("?")[2])
        first = 'id: 7\nevent: reward\ndata: {"rollout_id": "r1", "reward": 0.5}\n\n'
        frames = ":\n\n" if "cursor" in asked[-1] else first
        await route.fulfill(status=200, content_type="text/event-stream", body=frames)

    async with start() as system, browsing("about:blank") as (page, _):
        await page.route(re.compile(r"/feed(\?|$)"), end_at_once)
        await show(page, system, "overview")
        await expect(page.locator(".happening")).to_contain_text("reward 0.5")
        while asked[-2:] != ["cursor=7", "cursor=7"]:
            await asyncio.sleep(0.1)


async def test_a_key_is_asked_for_where_there_are_keys(start: Any) -> None:
    keys = {"api_keys": ["agent"], "admin_keys": ["admin"]}
    async with learned(start, **keys) as system, browsing(system.url) as (page, wrong):
        await page.add_init_script("window.confirm = (question) => { window.asked = question; return true; }")
        await page.get_by_label("API key").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator(".failure")).to_contain_text("does not accept this key")
        await log_in(page, "agent")
        await expect(page.locator(".stats")).to_contain_text("training rollouts")
        assert await page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href].join()") == (
            f"{{}},,{system.url}/"
        )
        await show(page, system, "versions")
        await page.get_by_role("button", name="Promote…").first.click()
        await expect(page.locator(".failure")).to_contain_text("an admin key is needed")
        await page.get_by_role("button", name="log out").click()
        await log_in(page, "admin")
        await page.get_by_role("row", name="5 ready").get_by_role("button").click()
        await expect(page.locator("main")).to_contain_text("Version 5 is live")
        assert "Make version 5 live?" in await page.evaluate("window.asked")
        await page.get_by_role("button", name="Roll back…").click()
        await expect(page.locator("main")).to_contain_text("Version 4 is live")
        assert wrong == []


async def log_in(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Log in").click()


async def test_nothing_that_an_agent_or_a_model_says_runs(start: Any) -> None:
    fields = ("rollout_id", "task_id", "agent", "mode", "status", "dropped", "calls", "tokens", "policy_version")
    lies = [dict.fromkeys(fields, forged) for forged in (ELEMENT, ELEMENT | {"constructor": None})]
    async with start() as system:
        await say_everything(system)
        async with browsing(system.url) as (page, wrong):
            await page.evaluate("localStorage.setItem('lightning-proxy-person', 'me')")
            for view in (*VIEWS, "rollouts/javascript:hurt", "rate?id=javascript:hurt"):
                await show(page, system, view)
                await page.locator("main button").evaluate_all("all => all.forEach(one => one.click())")
                await page.wait_for_timeout(100)
                assert (
                    await page.locator("main :is(script, img, iframe, object, embed, base, link, style)").count() == 0
                )
                assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
            assert wrong == []
            await page.route(re.compile(r"/rollouts\?"), lambda route: route.fulfill(json={"data": lies}))
            await show(page, system, "rollouts")
            await expect(page.locator("tbody tr")).to_have_count(2)
            assert await page.locator("main img").count() == 0
            assert await page.evaluate("window.hurt") is None


PHONE: Any = {"width": 390, "height": 844}
AA = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
FINDINGS = """async tags => {
    const { violations } = await axe.run(document, { runOnly: { type: "tag", values: tags } });
    return violations.flatMap(({ id, nodes }) =>
        nodes.map(({ target, failureSummary }) => `${id}: ${target} ${failureSummary}`));
}"""
# Whatever scrolls sideways: the page, or a part of it.
SIDEWAYS = """() => [...document.querySelectorAll("html, body *")].filter(one =>
    one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0
    && (one === document.documentElement || ["auto", "scroll"].includes(getComputedStyle(one).overflowX))
).map(one => `${one.tagName} ${one.className} ${one.scrollWidth} > ${one.clientWidth}`)"""
CLICKED = """
    window.clicked = new Set();
    const add = EventTarget.prototype.addEventListener;
    EventTarget.prototype.addEventListener = function (kind, ...more) {
        if (kind === "click") clicked.add(this);
        return add.call(this, kind, ...more);
    };
"""
# Tokens, JSON, filters, earlier messages: what is folded.
OPEN = """() =>
    document.querySelectorAll("main button[aria-expanded=false]").forEach(one => one.click())"""
NOT_BY_KEY = """() => [...clicked].filter(one => one.isConnected && one.tabIndex < 0)
    .map(one => one.outerHTML)"""


async def findings(page: Page) -> Any:
    axe = pytest.importorskip("axe_playwright_python", reason="no axe-playwright-python: `make setup` brings it")
    await page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())
    return await page.evaluate(FINDINGS, AA)


async def test_every_view_is_accessible_by_keyboard_too_and_scrolls_nothing_sideways_on_a_phone(
    start: Any, running: Any, tmp_path: Path
) -> None:
    found: Any = {}
    async with learned(start) as system, browsing("about:blank") as (page, _):
        await page.add_init_script(CLICKED)
        for view in await every(page, system):
            await page.set_viewport_size(PHONE)
            await page.emulate_media(color_scheme="dark")
            await show(page, system, view)
            found[view] = await page.evaluate(SIDEWAYS)
            await page.evaluate(OPEN)
            found[view] += await findings(page)
            await page.set_viewport_size({"width": 1280, "height": 800})
            await page.emulate_media(color_scheme="light")
            found[view] += [*await findings(page), *await page.evaluate(NOT_BY_KEY)]
            assert await page.evaluate("clicked.size") > 0
        await page.evaluate("localStorage.setItem('lightning-proxy-person', 'me')")
        await show(page, system, "rate?id=multiply-4-1")
        await expect(page.get_by_role("form", name="Rate")).to_be_visible()
        found["rate"] = await findings(page)
        await show(page, system, "overview")
        chart = page.get_by_label("Reward by training step,")
        await chart.focus()
        await page.keyboard.press("ArrowLeft")
        last = await chart.locator("figcaption").inner_text()
        await page.keyboard.press("ArrowLeft")
        await expect(chart.locator("figcaption")).not_to_have_text(last)
    async with running(tmp_path / "empty", api_keys=["agent"]) as system:
        (one,) = await system.post("/rollouts", {"task_id": "t1"}, Authorization="Bearer agent")
        async with browsing(system.url, color_scheme="dark") as (page, _):
            await expect(page.get_by_label("API key")).to_be_visible()
            found["login"] = await findings(page)
            await log_in(page, "agent")
            for view in await every(page, system):
                await show(page, system, view.partition("?")[0].replace("multiply-4-1", one["rollout_id"]))
                found[f"{view} where there is nothing yet"] = await findings(page)
    assert {view: these for view, these in found.items() if these} == {}


async def test_on_a_phone_rewards_come_first_and_filters_and_views_are_folded(start: Any) -> None:
    async with start() as system, browsing(system.url, viewport=PHONE, has_touch=True) as (page, _):
        await system.chat("r")
        await show(page, system, "rollouts")
        card = page.locator("tbody tr").first
        await expect(card.locator("td").nth(1)).to_have_attribute("data-label", "reward")
        await expect(page.get_by_label("status")).to_be_hidden()
        await page.get_by_role("button", name="filters").click()
        await expect(page.get_by_label("status")).to_be_visible()
        await page.get_by_role("button", name="views: rollouts").click()
        await page.get_by_role("link", name="overview").click()
        await expect(page.get_by_role("button", name="views: overview", expanded=False)).to_be_visible()
