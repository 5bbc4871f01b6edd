"""The page on a phone, by keyboard and for those who cannot see well: every view, with data and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from support.browser import browsing, needs_browser
from support.dashboards import dashboard
from support.views import Running, every, learned, show

axe = pytest.importorskip("axe_playwright_python", reason="no axe-playwright-python: `make setup` brings it")
pytestmark = needs_browser

PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
AXE = (Path(axe.__file__).parent / "axe.min.js").read_text()
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
NOT_BY_KEY = """() => [...clicked].filter(one => one.isConnected && one.tabIndex < 0 && !one.closest(".uplot"))
    .map(one => one.outerHTML)"""


async def opened(page: Page) -> None:
    """Open what is folded: tokens, JSON, filters, earlier messages."""
    await page.locator("main button[aria-expanded=false]").evaluate_all("all => all.forEach(one => one.click())")


async def findings(page: Page) -> list[str]:
    await page.evaluate(AXE)
    found: list[str] = await page.evaluate(FINDINGS, AA)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{}, PHONE], ids=["desk", "phone"])
async def test_axe_finds_nothing_that_wcag_aa_forbids(
    running: Running, tmp_path: Path, scheme: str, size: dict[str, Any]
) -> None:
    found: dict[str, list[str]] = {}
    seen_as: dict[str, Any] = {"color_scheme": scheme, **size}
    async with learned(running, tmp_path) as system, browsing(system.url, **seen_as) as (page, _):
        for view in await every(page, system):
            await show(page, system, view)
            await opened(page)
            found[view] = await findings(page)
        await page.evaluate("localStorage.setItem('lightning-proxy-person', 'me')")
        await show(page, system, "rate?id=run-004-2-1")
        await expect(page.get_by_role("form", name="Rate")).to_be_visible()
        found["rate"] = await findings(page)
        await page.get_by_role("button", name="Keys").click()
        found["keys"] = await findings(page)
        await show(page, system, "versions")
        await page.get_by_role("button", name="Promote…").first.click()
        found["promote"] = await findings(page)
        await page.goto(f"{system.url}/docs")
        await page.locator("summary").first.click()
        found["docs"] = await findings(page)
    assert {view: these for view, these in found.items() if these} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_where_there_is_nothing_yet(running: Running, tmp_path: Path, scheme: str) -> None:
    found: dict[str, list[str]] = {}
    agent = {"Authorization": "Bearer agent"}
    async with running(tmp_path, api_keys=["agent"]) as system:
        _, (one,) = await system.call("POST", "/rollouts", {"task_id": "t1"}, **agent)
        async with browsing(system.url, color_scheme=scheme) as (page, _):
            await expect(page.get_by_label("API key")).to_be_visible()
            found["login"] = await findings(page)
            await page.get_by_label("API key").fill("agent")
            await page.keyboard.press("Enter")
            for view in await every(page, system):
                await show(page, system, view.partition("?")[0].replace("run-004-2-1", one["rollout_id"]))
                found[view] = await findings(page)
    assert {view: these for view, these in found.items() if these} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{}, PHONE], ids=["desk", "phone"])
async def test_axe_finds_nothing_on_the_page_of_several_stores(
    running: Running, tmp_path: Path, scheme: str, size: dict[str, Any]
) -> None:
    for name in ("learned", "empty"):
        (tmp_path / name).mkdir()
        async with learned(running, tmp_path / name) if name == "learned" else running(tmp_path / name):
            pass
        (tmp_path / name / "store.db").rename(tmp_path / name / "lightning.db")
    async with (
        dashboard(tmp_path, "2 stores") as (url, key),
        browsing("about:blank", color_scheme=scheme, **size) as (page, _),
    ):
        await page.goto(f"{url}/?key={key}")
        await expect(page.get_by_role("link", name="learned")).to_be_visible()
        assert (await findings(page), await page.evaluate(SIDEWAYS)) == ([], [])


async def test_nothing_is_shown_without_a_command_that_helps(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, browsing(system.url) as (page, _):
        for view in (
            "overview",
            "rollouts",
            "tasks",
            "versions",
            "compare",
            "costs",
            "evaluations",
            "prompts",
            "rewarders",
        ):
            await show(page, system, view)
            empty = page.locator(".empty")
            await expect(empty.first).to_be_visible()
            for one in await empty.all():
                await expect(one.locator("code").first).to_be_visible()


async def test_a_phone_scrolls_nothing_sideways_and_shows_rewards_first(running: Running, tmp_path: Path) -> None:
    found: dict[str, list[str]] = {}
    async with learned(running, tmp_path) as system, browsing(system.url, **PHONE) as (page, wrong):
        for view in await every(page, system):
            await show(page, system, view)
            found[view] = await page.evaluate(SIDEWAYS)
        await show(page, system, "rollouts")
        card = page.locator("tbody tr").first
        await expect(card.locator("td").nth(1)).to_have_attribute("data-label", "reward")
        await expect(page.get_by_label("status")).to_be_hidden()
        await page.get_by_role("button", name="filters").click()
        await page.get_by_label("status").select_option("failed")
        await expect(page.get_by_role("button", name="filters: 1")).to_be_visible()
        await page.get_by_role("button", name="views: rollouts").click()
        await page.get_by_role("link", name="tasks").click()
        await expect(page.get_by_role("button", name="views: tasks", expanded=False)).to_be_visible()
        assert wrong.seen == []
    assert {view: these for view, these in found.items() if these} == {}


async def test_whatever_can_be_clicked_can_be_reached_by_keyboard(running: Running, tmp_path: Path) -> None:
    async with learned(running, tmp_path) as system, browsing("about:blank") as (page, _):
        await page.add_init_script(CLICKED)
        for view in await every(page, system):
            await show(page, system, view)
            await opened(page)
            assert await page.evaluate(NOT_BY_KEY) == [], view
            assert await page.evaluate("clicked.size") > 0
        await show(page, system, "overview")
        chart = page.get_by_label("Reward by training step,")
        await chart.focus()
        await page.keyboard.press("ArrowLeft")
        last = await chart.locator(".u-value").first.inner_text()
        await page.keyboard.press("ArrowLeft")
        await expect(chart.locator(".u-value").first).not_to_have_text(last)
