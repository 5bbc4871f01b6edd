"""The page in a real browser, where one is there: it shows what was recorded. tests/long/test_page.py looks closer."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Route, expect

from lightning_proxy.core.records import Limits
from lightning_proxy.store.training import CallCredit
from support.browser import browsing, needs_browser
from support.byte_tokens import record, train

Running = Callable[..., AbstractAsyncContextManager[Any]]


@needs_browser
async def test_a_rollout_is_seen_from_the_overview_to_its_answer(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1", X_Task_Id="t1")
        await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 0.75})
        async with browsing(system.url) as (page, wrong):
            await expect(page.locator(".stat", has_text="training rollouts")).to_contain_text("1")
            await page.keyboard.press("g")
            await page.keyboard.press("r")
            row = page.get_by_role("row", name="r1")
            await expect(row).to_contain_text("0.75")
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
            await expect(page.locator(".call")).to_contain_text("by base with")
            await expect(page.locator("main")).to_contain_text("One context: each call continues the one before.")
        assert wrong.seen == []


async def record_contexts(system: Any) -> None:
    """A rollout whose first answer is rejected, with a sub-agent, and a summary that a step leaves out."""
    ask = {
        "id": f"call_{1:024x}",
        "type": "function",
        "function": {"name": "ask", "arguments": json.dumps({"order": ORDER})},
    }
    calls = {"role": "assistant", "content": None, "tool_calls": [ask]}
    report, summary = said("The appendix says that the parser was moved."), said("So far: the parser was moved away.")
    task = [{"role": "system", "content": "You lead."}, {"role": "user", "content": "Find why the build fails."}]
    result = {"role": "tool", "tool_call_id": ask["id"], "content": report["content"]}
    known = [*task, calls, result, said("The parser is missing, it seems to me now.")]
    turns = [
        ("lead", task, said("The compiler is too old, I would say.")),
        ("lead", task, calls),
        ("helper", [{"role": "system", "content": "You help."}, {"role": "user", "content": ORDER}], report),
        ("lead", known[:-1], known[-1]),
        ("lead", [*known, {"role": "user", "content": "Sum up."}], summary),
        ("lead", [*task, {"role": "user", "content": summary["content"]}], said("Include it from its new place.")),
    ]
    for agent, messages, answer in turns:
        system.vllm.answer = lambda _, answer=answer: answer
        body = {"model": "policy", "messages": messages}
        assert (await system.call("POST", "/rollouts/r1/v1/chat/completions", body, X_Agent_Name=agent))[0] == 200
    await system.call("POST", "/reward", {"rollout_id": "r1", "reward": 1.0})
    placed = [(1, 0.5, 0, "first"), (2, -0.25, 1, "new"), (3, 0.5, 0, "merged"), (5, 0.5, 2, "new")]
    credit = [CallCredit("r1", seq, 1.0, advantage, row, why) for seq, advantage, row, why in placed]
    async with system.store() as store:
        await store.steps.claim(["r1"], 0, credit=credit)


ORDER = "Read the appendix and say what is in it."
HOSTILE = "<img src=x onerror=window.hurt=1>"
WIDTHS = "document.documentElement.scrollWidth - innerWidth"


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
async def test_a_rollouts_contexts_are_lanes_that_lead_to_its_calls(
    running: Running, tmp_path: Path, width: int
) -> None:
    async with running(tmp_path) as system:
        await record_contexts(system)
        size: Any = {"width": width, "height": 700}
        async with browsing(f"{system.url}/#/rollouts/r1", viewport=size) as (page, wrong):
            lanes = page.locator(".lanes li")
            await expect(lanes).to_have_text([
                "0 lead new, rejected", "1 lead retries 0, advantage +0.5", "2 helper delegates 1, advantage −0.25",
                "3 lead continues 1, returns 2, advantage +0.5", "4 lead continues 3",
                "5 lead compacts 4, advantage +0.5",
            ])  # fmt: skip
            boxes = [await box.get_attribute("class") for box in await lanes.locator(".box").all()]
            assert boxes == ["box out", "box up", "box down", "box up", "box out", "box up"]
            left = [box["x"] for li in await lanes.all() if (box := await li.locator("button").bounding_box())]
            assert (left[2] > left[1] == left[3]) == (width > 600), "on a phone it is a list"
            await lanes.nth(4).locator("button").click()
            await expect(page.locator("article.call").nth(4).locator("h3")).to_be_in_viewport()
            await expect(page.locator("article.call").nth(4)).to_contain_text("left out: a summary")
            assert await page.evaluate(WIDTHS) <= 0
            await page.goto(f"{system.url}/#/rollouts/r1/rows")
            await expect(page.get_by_role("row", name="left out: another attempt was used")).to_have_count(1)
            assert await page.evaluate(WIDTHS) <= 0
        assert wrong.seen == []


@needs_browser
async def test_what_a_context_is_called_stays_text(running: Running, tmp_path: Path) -> None:
    async def forged(route: Route) -> None:
        answer = await (await route.fetch()).json()
        for call in answer["calls"]:
            call |= {"agent": HOSTILE, "contexts": [{"edge": HOSTILE, "call_id": HOSTILE}]}
        await route.fulfill(json=answer)

    async with running(tmp_path) as system:
        await record_contexts(system)
        async with browsing(system.url) as (page, wrong):
            await page.route(re.compile(r"/rollouts/r1$"), forged)
            await page.goto(f"{system.url}/#/rollouts/r1")
            await expect(page.locator(".lanes li").first).to_contain_text(f"0 {HOSTILE} {HOSTILE} ?")
            assert await page.locator("main img").count() == 0 and await page.evaluate("window.hurt") is None
        assert wrong.seen == []


@needs_browser
async def test_tokens_are_shown_as_texts_whatever_they_say(running: Running, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e€\x00"
    async with running(tmp_path) as system, system.store() as store:
        await record(store, "good", [hostile, "b"], 1.0)
        await record(store, "bad", ["c"], 0.0)
        step = await train(store)
        async with browsing(f"{system.url}/#/rollouts/good") as (page, wrong):
            call = page.locator(".call").first
            await call.get_by_role("button", name="tokens").click()
            await expect(call.locator(".tokens")).to_contain_text("€⋮⋮\\u0000")
            await call.locator(".token", has_text="€").hover()
            trained = (
                f"“€”, id 226, log-probability -0.5, probability 0.607; trained in step {step} with advantage +0.5"
            )
            await expect(call.locator(".tokens-of [role=status]")).to_contain_text(trained)
            await page.get_by_role("link", name="training row").click()
            await expect(page.locator(".tokens")).to_contain_text("hi <img src=x onerror=alert(1)>")
            assert await page.locator(".tokens img").count() == 0
        assert (wrong.seen, wrong.refused) == ([], [])


@needs_browser
async def test_rollouts_that_are_chosen_are_rewarded_together(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.vllm.answer = lambda _: {"role": "assistant", "content": "<b onclick=alert(1)>\u202ebold"}
        for name in ("r1", "r2", "r3"):
            await system.chat(name)
        async with browsing(f"{system.url}/#/rollouts") as (page, wrong):
            await expect(page.locator(".words").first).to_contain_text("hi<b onclick=alert(1)>")
            await expect(page.locator("tbody .badge", has_text="not ended")).to_have_count(3)
            await page.get_by_label("choose r1").check()
            await page.get_by_label("choose r2").check()
            chosen = page.locator(".chosen-rows")
            await chosen.get_by_label("number or note").fill("0.5")
            await chosen.get_by_role("button", name="reward").click()
            await expect(chosen).to_contain_text("rewarded")
            await expect(page.locator("tbody b", has_text="0.5")).to_have_count(2)
        assert (wrong.seen, wrong.refused) == ([], [])


@needs_browser
async def test_requests_are_copied_as_commands_that_mean_the_same(running: Running, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": 'it\'s "$HOME" `id` \\ \n\u2028 \U0001f600'}]}
    async with running(tmp_path) as system, browsing(system.url) as (page, _):
        made = (
            "([path, body]) => import('/page/requests.mjs').then((m) => [m.asCurl(path, body), m.asPython(path, body)])"
        )
        curl, python = await page.evaluate(made, ["v1/chat/completions", body])
        for_claude = await page.evaluate(made, ["v1/messages", body])
        long = body | {"n": ["it's"] * 50_000}
        (longer, _) = await page.evaluate(made, ["v1/chat/completions", long])
    (tmp_path / "curl").write_text("#!/bin/sh\ncat\n")
    (tmp_path / "curl").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["sh"], input=longer.encode(), env=path, capture_output=True, check=True)
    assert json.loads(ran.stdout) == long
    words = shlex.split(curl)
    assert (words[1], json.loads(words[-1])) == (f"{system.url}/v1/chat/completions", body)
    assert "anthropic-version: 2023-06-01" in shlex.split(for_claude[0])
    assert 'headers["anthropic-version"] = "2023-06-01"' in for_claude[1] and ast.parse(for_claude[1])
    assert "anthropic" not in curl + python and 'os.environ.get("OPENAI_API_KEY", "none")' in python
    texts = [node.value for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Constant)]
    assert json.dumps(body) in [json.dumps(json.loads(one)) for one in texts if str(one).startswith('{"messages')]


KEEP_TEXTS = """
const own = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
  (this.canvas.texts ??= new Set()).add(text);
  own.call(this, text, ...at);
};
"""


@needs_browser
async def test_axes_of_rewards_begin_at_0_and_a_single_version_has_its_place(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        for name, reward in (("r1", 0.0435), ("r2", 0.0455)):
            await system.chat(name, X_Task_Id="t1")
            await system.call("POST", "/reward", {"rollout_id": name, "reward": reward})
        async with browsing(system.url) as (page, wrong):
            await page.add_init_script(KEEP_TEXTS)
            await page.reload()
            chart = page.get_by_label("Reward by policy version,").locator("canvas")
            await expect(chart).to_be_visible()
            texts = await chart.evaluate("canvas => [...canvas.texts]")
    assert wrong.seen == []
    assert sorted(map(float, texts)) == [0, 0.01, 0.02, 0.03, 0.04]


@needs_browser
async def test_the_overview_says_each_number_once_and_of_what(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.chat("r1")
        status = (await system.call("GET", "/status"))[1]
        status["recent"] |= {"calls": 10, "by_status": {"incomplete": 7, "ok": 2, "error": 1}}
        status["verified"] |= {"version": 1, "deviations": 3.93, "story": "3.93 standard deviations from the old"}
        async with browsing("data:text/html,") as (page, _):
            await page.route("**/status", lambda route: route.fulfill(json=status))
            await page.goto(system.url)
            for label, text in {
                "waiting for the trainer": "0 of 64 rollouts",
                "calls that failed": "33.3 %1 error7 under way",
                "verified": "yes vLLM serves the new weights3.93 standard deviations from the old",
            }.items():
                await expect(page.locator(".stat", has_text=label)).to_contain_text(text)


@needs_browser
async def test_a_version_is_not_verified_yet_and_the_band_ends_where_rewards_end(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path) as system, system.store() as store:
        for reward in (0.0, 1.0):
            await system.chat(f"r{reward:g}", X_Task_Id="t1")
            await system.call("POST", "/reward", {"rollout_id": f"r{reward:g}", "reward": reward})
        step = await store.steps.claim([], 0)
        rewards = {"reward_mean": 0.9, "reward_std": 0.3, "reward_min": 0.0, "reward_max": 1.0, "merge_rate": 0.5}
        await store.steps.trained(step, None, {"version": 1, **rewards})
        await store.versions.set_live(await store.versions.new("merged", step, {}), step)
        async with browsing(system.url) as (page, wrong):
            edges = page.get_by_label("Reward by training step,").locator(".edge .u-value")
            await expect(edges).to_have_text(["0.6", "1"])
            await expect(page.get_by_label("calls that continue a row, 1 steps. Last: value 0.5.")).to_have_count(1)
            await expect(page.locator(".stat", has_text="verified")).to_contain_text("not verified yet")
            await page.goto(f"{system.url}/#/versions")
            await expect(page.get_by_role("row", name="live")).to_contain_text("not verified yet")
            await page.goto(f"{system.url}/#/tasks")
            await expect(page.get_by_role("row", name="t1")).to_contain_text("in between")
        assert wrong.seen == []


@needs_browser
async def test_a_team_is_shown_no_number_that_it_is_not_given_and_offered_nothing_that_it_may_not(
    running: Running, tmp_path: Path
) -> None:
    async with running(tmp_path, publish="lora", api_keys=["agent"]) as system, system.store() as store:
        team, _ = await store.keys.create("team", "agent", Limits(), recording=True, scope="own")
        await store.steps.trained(await store.steps.claim([], 0), None, {"reward_mean": 0.5, "step_s": 2.0})
        await system.candidate(store, tmp_path)
        async with asyncio.timeout(10):
            while (await system.chat("r1", Authorization=f"Bearer {team}"))[0] != 200:
                await asyncio.sleep(0.05)
        for key, seen in (("agent", 1), (team, 0)):
            async with browsing(f"{system.url}/#/overview?key={key}") as (page, wrong):
                await expect(page.locator(".stats")).to_contain_text("training rollouts")
                for label in ("last reward", "tokens answered", "calls that failed"):
                    await expect(page.locator(".stat", has_text=label)).to_have_count(seen)
                await expect(page.get_by_role("heading", name="Signs of a collapse")).to_have_count(seen)
                await page.goto(f"{system.url}/#/costs")
                await expect(page.get_by_role("heading", name="Calls by day")).to_have_count(1)
                await expect(page.get_by_role("heading", name="Training steps")).to_have_count(seen)
                await page.goto(f"{system.url}/#/versions")
                await expect(page.get_by_role("row", name="candidate")).to_have_count(1)
                await expect(page.get_by_role("button", name="Promote…")).to_have_count(seen)
            assert wrong.seen == []
