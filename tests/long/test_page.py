"""Every view of the page in a real browser: what it shows, keys, hostile texts, a phone, and ten thousand rollouts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from playwright.async_api import Page, expect

from lightning_proxy.core.records import RolloutName
from lightning_proxy.features.page.proxy import FILES
from support.browser import browsing, needs_browser
from support.views import STEPS, VIEWS, Running, learned, show

pytestmark = needs_browser


async def test_each_view_shows_what_it_is_for(running: Running, tmp_path: Path) -> None:
    async with learned(running, tmp_path) as system, browsing(system.url) as (page, wrong):
        for view, shown in VIEWS.items():
            await show(page, system, view)
            await expect(page.locator("main")).to_contain_text(shown)
        assert (wrong.seen, wrong.refused) == ([], [])


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_view_is_wider_than_a_phone(running: Running, tmp_path: Path, scheme: str) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme, "has_touch": True}
    async with learned(running, tmp_path) as system, browsing(system.url, **phone) as (page, wrong):
        for view in VIEWS:
            await show(page, system, view)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360, view
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark == {"light": "rgb(246, 247, 249)", "dark": "rgb(20, 22, 26)"}[scheme]
        assert wrong.seen == []


async def test_a_call_is_shown_with_its_credit_tools_and_tokens(running: Running, tmp_path: Path) -> None:
    async with learned(running, tmp_path) as system, browsing(system.url) as (page, wrong):
        _, rows = await system.call("GET", "/rollouts/run-004-2-1/rows")
        await show(page, system, "rollouts/run-004-2-1")
        call = page.locator(".call").first
        advantage = f"{abs(rows['calls'][0]['advantage']):.3g}"
        await expect(call.locator("header")).to_contain_text(advantage)
        await expect(call).to_contain_text("calls calculator")
        await expect(call).to_contain_text("returned calculator395")
        await call.get_by_role("button", name="tokens").click()
        await call.locator(".tokens").focus()
        await page.keyboard.press("ArrowRight")
        await expect(call.locator(".tokens-of [role=status]")).to_contain_text(
            "Token 2 of 12: id 501, log-probability -"
        )
        assert wrong.seen == []


async def test_rollouts_are_filtered_and_sorted_and_the_address_says_how(running: Running, tmp_path: Path) -> None:
    async with learned(running, tmp_path) as system, browsing(system.url) as (page, wrong):
        await show(page, system, "rollouts")
        await page.keyboard.press("/")
        await page.keyboard.type("no such words")
        await page.keyboard.press("Enter")
        await expect(page.locator(".empty")).to_contain_text("No rollout is like that")
        await page.get_by_role("link", name="Show all rollouts").click()
        await page.locator("select[name=mode]").select_option("eval")
        await expect(page).to_have_url(re.compile(r"#/rollouts\?mode=eval$"))
        await expect(page.locator("tbody tr")).to_have_count(3 * STEPS)
        await page.get_by_role("button", name="reward").click()
        rewards = [float(text) for text in await page.locator("tbody td:nth-child(2)").all_text_contents()]
        assert rewards == sorted(rewards, reverse=True)
        await page.go_back()
        await expect(page.locator("tbody tr")).to_have_count(100)
        await page.get_by_role("button", name="Show older rollouts").click()
        await expect(page.locator("tbody tr")).to_have_count(19 * STEPS)
        assert wrong.seen == []


async def test_what_happens_appears_by_itself(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, browsing(system.url) as (page, wrong):
        await show(page, system, "rollouts")
        await expect(page.locator(".empty")).to_contain_text(f"{system.url}/v1")
        await expect(page.locator(".feed")).to_have_text("live")
        await system.chat("r1")
        await expect(page.locator("tbody tr")).to_contain_text("r1")
        await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 0.25})
        await expect(page.locator("tbody tr")).to_contain_text("0.25")
        assert wrong.seen == []


HIDE = """hidden => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_the_feed_goes_on_from_its_cursor(running: Running, tmp_path: Path) -> None:
    asked: list[str] = []

    async def end_at_once(route: Any) -> None:
        asked.append(route.request.url.partition("?")[2])
        frames = (
            ":\n\n" if "cursor" in asked[-1] else 'id: 7\nevent: reward\ndata: {"rollout_id": "r1", "reward": 0.5}\n\n'
        )
        await route.fulfill(status=200, content_type="text/event-stream", body=frames)

    async with running(tmp_path) as system, browsing("about:blank") as (page, _):
        await page.route(re.compile(r"/feed(\?|$)"), end_at_once)
        await show(page, system, "overview")
        await expect(page.locator(".happening")).to_contain_text("reward 0.5")
        while asked[-2:] != ["cursor=7", "cursor=7"]:
            await asyncio.sleep(0.1)
        await page.evaluate(HIDE, True)
        before = len(asked)
        await asyncio.sleep(3)
        assert len(asked) <= before + 1  # one may have been under way
        await page.evaluate(HIDE, False)
        while len(asked) < before + 2:
            await asyncio.sleep(0.1)
        assert asked[-1] == "cursor=7"


async def test_a_key_is_asked_for_where_there_are_keys(running: Running, tmp_path: Path) -> None:
    keys = {"api_keys": ["agent"], "admin_keys": ["admin"]}
    async with learned(running, tmp_path, **keys) as system, browsing(system.url) as (page, wrong):
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
        await page.get_by_role("button", name="Promote", exact=True).click()
        await expect(page.get_by_role("dialog")).to_contain_text("an admin key is needed")
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("button", name="log out").click()
        await log_in(page, "admin")
        await page.get_by_role("row", name="5 ready").get_by_role("button").click()
        await expect(page.get_by_role("dialog")).to_contain_text("Make version 5 live?")
        await page.get_by_role("button", name="Promote", exact=True).click()
        await expect(page.locator("main")).to_contain_text("Version 5 is live")
        await page.get_by_role("button", name="Roll back…").click()
        await page.get_by_role("button", name="Roll back", exact=True).click()
        await expect(page.locator("main")).to_contain_text("Version 4 is live")
        assert wrong.seen == []


async def log_in(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Log in").click()


async def test_a_key_that_sees_little_breaks_nothing(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=["agent"]) as system:
        agent = {"Authorization": "Bearer agent"}
        _, (opened,) = await system.call("POST", "/rollouts", {"task_id": "t1"}, **agent)
        await system.chat("others", **agent)
        made = await system.lightning("keys", "create", "little", "--scope", "own")
        for key, shown in ((opened["api_key"], "this key is for rollout"), (made.stdout.strip(), "training rollouts")):
            async with browsing(system.url) as (page, wrong):
                await log_in(page, key)
                await expect(page.locator("main")).to_contain_text(shown)
                for view in ("rollouts", "tasks", "versions", "compare", f"rollouts/{opened['rollout_id']}"):
                    await show(page, system, view)
                await expect(page.locator("h1.id")).to_have_count(1 if key == opened["api_key"] else 0)
                assert wrong.seen == []


HOSTILE = [
    "<script>window.hurt = 1; alert(1)</script>",
    '<img src=x onerror="window.hurt = 1; alert(2)">',
    "<svg onload=alert(3)></svg><iframe srcdoc='<script>parent.hurt = 1</script>'></iframe>",
    "javascript:window.hurt=1",
    "\"';--> ]]> ${alert(4)} {{constructor.constructor('alert(5)')()}} `${hurt=1}`",
    "\u202e\u2067right to left\u2069\u202c",
    "\ud800 alone \udfff",
    "w" * 100_000,
    "\x00\x1b[31m",
    '{"type": "script", "props": {"dangerouslySetInnerHTML": {"__html": "<img src=x onerror=alert(6)>"}}}',
]

ODD_PLACES = ["%E0%A4%A", "rollouts/%00", "rollouts?text=" + HOSTILE[1], "__proto__", "compare?a=x&b=y"]


async def test_nothing_that_an_agent_or_a_model_says_runs(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await say_everything(system)
        async with browsing(system.url) as (page, wrong):
            for view in ("overview", "rollouts", "tasks", "rollouts/javascript:hurt", "rollouts/javascript:hurt/rows",
                         "rollouts/javascript:hurt/beside"):  # fmt: skip
                await show(page, system, view)
                for button in await page.locator("main button").all():
                    await button.evaluate("button => button.click()")
                await page.wait_for_timeout(100)
                ours = "main :is(script, img, iframe, object, embed, base, link, style, [onerror], [onload], [onclick])"
                assert await page.locator(ours).count() == 0, view
                links = "[...document.querySelectorAll('main [href]')].every(a => a.href.startsWith(`${origin}/#/`))"
                assert await page.evaluate(links)
                assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
            await show(page, system, "rollouts/javascript:hurt")
            await expect(page.locator("main")).to_contain_text(HOSTILE[0])
            for place in (*HOSTILE[:5], *ODD_PLACES):
                await page.evaluate("place => { location.hash = '#/' + place }", place)
                await page.wait_for_timeout(100)
            assert await page.evaluate("window.hurt") is None
            assert wrong.seen == []


async def say_everything(system: Any) -> None:
    """Calls, tools, events, rewards and errors of one rollout whose every free text is hostile."""
    rollout = {"X-Task-Id": "javascript:task", "X-Agent-Name": "constructor"}
    path = "/rollouts/javascript:hurt/v1/chat/completions"
    for i, text in enumerate(HOSTILE):
        called = {"id": f"c{i}", "type": "function", "function": {"name": text[:200], "arguments": text}}
        system.vllm.answer = lambda _, text=text, called=called: {
            "role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [called], "refusal": text,
        }  # fmt: skip
        parts = [
            {"type": "text", "text": text},
            {"type": text[:99], "x": text},
            {"type": "image_url", "image_url": text},
        ]
        odd = [{"role": text, "content": text}, {"role": "user", "content": parts}]
        result = {"role": "tool", "tool_call_id": f"c{i - 1}", "content": text, "name": text[:99]}
        body = {"model": "policy", "messages": [*odd, result] if i else odd}
        assert (await system.call("POST", path, body, **rollout))[0] == 200
        event = {"kind": "action", "name": text[:99], "arguments": text, "result": text}
        await system.call("POST", "/rollouts/javascript:hurt/events", event)
        posted = {
            "rollout_id": "javascript:hurt",
            "reward": i / 9,
            "source": text[:99],
            "comment": text[:999],
            "name": text[:99],
        }
        await system.call("POST", "/reward", posted | {"final": False})
    for body in ({"model": "policy", "messages": HOSTILE}, {"model": HOSTILE[0], "messages": [None, 1, [HOSTILE[1]]]}):
        await system.call("POST", path, body, **rollout)
    _, found = await system.call("GET", "/rollouts/javascript:hurt")
    assert len(found["calls"]) >= len(HOSTILE)
    assert len(found["rewards"]) > 0


async def test_json_that_looks_like_an_element_is_none(running: Running, tmp_path: Path) -> None:
    element = {"type": "img", "props": {"src": "x", "onerror": "window.hurt = 1"}, "key": None, "ref": None, "__v": 1}
    fields = ("rollout_id", "task_id", "agent", "mode", "status", "dropped", "calls", "tokens", "policy_version")
    lies = [dict.fromkeys(fields, forged) | {"step": None} for forged in (element, element | {"constructor": None})]

    async with running(tmp_path) as system, browsing("about:blank") as (page, _):
        await page.route(
            re.compile(r"/rollouts\?"), lambda route: route.fulfill(json={"data": lies, "next_cursor": None})
        )
        await show(page, system, "rollouts")
        await expect(page.locator("tbody tr")).to_have_count(2)
        assert await page.locator("main img").count() == 0
        assert await page.evaluate("window.hurt") is None


TOOL = {"name": "add", "arguments": '{"a": 1}'}
SHOWN: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "chat": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}]},
        {"choices": [{"message": {"role": "assistant", "content": "two", "tool_calls": [{"function": TOOL}]}}]},
        ["user text one", "assistant text two", 'assistant call {\n  "a": 1\n}'],
    ),
    "completions": ({"prompt": "one"}, {"choices": [{"text": "two"}]}, ["prompt text one", "assistant text two"]),
    "responses": (
        {"instructions": "be short", "input": [{"type": "function_call_output", "call_id": "c", "output": "one"}]},
        {"output": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
                    {"type": "function_call", **TOOL}]},
        ["system text be short", "tool result one", "assistant thought hm", "assistant text two",
         'assistant call {\n  "a": 1\n}'],
    ),
    "messages": (
        {"system": "be short", "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "one"}]}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "two"},
                                          {"type": "tool_use", "name": "add", "input": {"a": 1}}]},
        ["system text be short", "user result one", "assistant thought hm", "assistant text two",
         'assistant call {\n  "a": 1\n}'],
    ),
    "an error": ({"messages": []}, {"error": {"message": "busy"}}, ["error error busy"]),
}  # fmt: skip
READ = """async pairs => {
    const { requestMessages, answerMessages } = await import("/page/messages.mjs");
    const told = ({ role, blocks }) => blocks.map(({ kind, content }) => `${role} ${kind} ${content}`);
    return pairs.map(([request, response]) => [...requestMessages(request), ...answerMessages(response)].flatMap(told));
}"""


async def test_all_recorded_apis_are_read_as_messages(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, browsing(system.url) as (page, _):
        found = await page.evaluate(READ, [[request, response] for request, response, _ in SHOWN.values()])
        assert dict(zip(SHOWN, found, strict=True)) == {name: shown for name, (_, _, shown) in SHOWN.items()}


WHOLE = """async short => (await import("/page/whole.mjs")).wholeRequests(short).calls.map(call => call.request)"""


async def test_requests_are_whole_that_the_api_says_in_parts(running: Running, tmp_path: Path) -> None:
    """Shared messages, tools and texts, one of them with characters of two UTF-16 units."""
    text = "\N{SLIGHTLY SMILING FACE} be short. " * 40
    tools = [{"type": "function", "function": {"name": f"tool{n}", "parameters": {}}} for n in range(3)]
    messages = [{"role": "system", "content": text}]
    async with running(tmp_path) as system, browsing(system.url) as (page, wrong):
        for turn in range(4):
            messages.append({"role": "user", "content": f"turn {turn} \N{GRINNING FACE}"})
            body = {"model": "policy", "messages": messages, "tools": tools[: turn + 1], "user": text + str(turn)}
            _, answer = await system.call("POST", "/rollouts/r/v1/chat/completions", body)
            messages.append(answer["choices"][0]["message"])
        short, whole = [(await system.call("GET", f"/rollouts/r?requests={form}"))[1] for form in ("short", "whole")]
        assert short["calls"][-1]["request_of"]["messages"] > 0, "nothing is shared"
        found = await page.evaluate(WHOLE, short)
        assert found == [call["request"] for call in whole["calls"]] and wrong.seen == []


async def test_no_json_breaks_the_reading_of_messages(running: Running, tmp_path: Path) -> None:
    dice = Random(0)
    names = re.findall(r"\w+", (FILES / "messages.mjs").read_text())

    def some(depth: int) -> Any:
        if not depth or dice.random() < 0.2:
            return dice.choice([None, True, 1.5, dice.choice(names)])
        if dice.random() < 0.3:
            return [some(depth - 1) for _ in range(2)]
        return {dice.choice(names): some(depth - 1) for _ in range(4)}

    async with running(tmp_path) as system, browsing(system.url) as (page, _):
        pairs = [[some(3), some(3)] for _ in range(2000)]
        found = await page.evaluate(READ, pairs)
        assert len(found) == len(pairs)


FIRST_PAINT_MS = 1000


async def test_the_first_paint_comes_within_a_second_with_ten_thousand_rollouts(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system, system.store() as store:
        names = [f"r{i}" for i in range(10_000)]
        await store.rollouts.open([(RolloutName(name, f"t{i % 200}"), name) for i, name in enumerate(names)], {})
        for first in range(0, len(names), 1000):
            posted = [{"rollout_id": name, "reward": 0.5} for name in names[first : first + 1000]]
            assert (await system.call("POST", "/reward", posted))[0] == 200
        for number in range(1000):
            step = await store.steps.claim(names[10 * number : 10 * number + 10], 0)
            await store.steps.trained(step, None, {"reward_mean": number / 1000, "reward_std": 0.1, "entropy": 1.0})
        for view, drawn in (("overview", ".uplot"), ("rollouts", "tbody tr"), ("tasks", "tbody tr")):
            times = [await first_paint(system, view, drawn) for _ in range(3)]
            print(f"{view}: first paint {[paint for paint, _ in times]} ms, all there {[full for _, full in times]} ms")
            assert min(paint for paint, _ in times) < FIRST_PAINT_MS


async def first_paint(system: Any, view: str, drawn: str) -> tuple[int, int]:
    """Milliseconds until something is painted, and until the view's data is there."""
    async with browsing("about:blank") as (page, _):
        await page.goto(f"{system.url}/#/{view}")
        await page.locator(drawn).first.wait_for()
        full = await page.evaluate("performance.now()")
        paint = await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        return round(paint), round(full)
