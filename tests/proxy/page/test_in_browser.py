"""The page in a real browser, where one is there: it shows what was recorded. tests/long/test_page.py looks closer."""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from playwright.async_api import expect

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
            row = page.locator("tbody tr")
            await expect(row).to_contain_text("0.75")
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
            await expect(page.locator(".call")).to_contain_text("by base with")
        assert wrong.seen == []


@needs_browser
async def test_a_rollouts_contexts_are_lanes_that_lead_to_its_calls(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        _, answer = await system.chat("r1")
        said = answer["choices"][0]["message"]
        history = [{"role": "system", "content": "another one"}, {"role": "user", "content": "hi"}, said]
        body = {"model": "policy", "messages": [*history, {"role": "user", "content": "more"}]}
        await system.call("POST", "/rollouts/r1/v1/chat/completions", body)
        async with browsing(f"{system.url}/#/rollouts/r1") as (page, wrong):
            await expect(page.locator(".lanes li")).to_have_count(2)
            await expect(page.locator(".lanes li").nth(1)).to_contain_text("edits 0")
            await page.locator(".lanes button").nth(1).click()
            await expect(page.locator("#call-1")).to_be_in_viewport()
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
    words = shlex.split(curl)
    assert (words[1], json.loads(words[-1])) == (f"{system.url}/v1/chat/completions", body)
    texts = [node.value for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Constant)]
    assert json.dumps(body) in [json.dumps(json.loads(one)) for one in texts if str(one).startswith('{"messages')]
