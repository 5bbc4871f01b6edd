"""The page's views over a history of learning, and what each of them shows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Page, expect

from lightning_proxy.features import FEATURES

from .learning import Learning

Running = Callable[..., AbstractAsyncContextManager[Any]]

STEPS = 6
_LEFT_OUT = {"costs", "judge", "prompts"} - {*FEATURES}
HREFS = "all => all.map(one => one.getAttribute('href'))"
_FEATURE = {"rate": "judge"}  # whose views have other names
_VIEWS = {
    "overview": "Reward by training step",
    "rollouts": "run-005-3-3",
    "rollouts/run-004-2-1": "Trained in step 5",
    "tasks": "multiply-00",
    "versions": "Version 6 is live",
    "versions?a=0&b=5": "paired tasks",
    "costs": "input tokens",
    "rate": "Say who you are",
    "prompts": "No prompts yet",
}
VIEWS = {view: words for view, words in _VIEWS.items() if _FEATURE.get(view, view) not in _LEFT_OUT}


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
    element = {"type": "img", "props": {"src": "x", "onerror": "window.hurt = 1"}, "key": None, "ref": None, "__v": 1}
    event = {"kind": "action", "name": "element", "arguments": element, "result": element | {"constructor": None}}
    await system.call("POST", "/rollouts/javascript:hurt/events", event)
    _, found = await system.call("GET", "/rollouts/javascript:hurt")
    assert len(found["calls"]) >= len(HOSTILE)
    assert len(found["rewards"]) > 0
