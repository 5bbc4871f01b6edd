"""The page's views over a history of learning, and what each of them shows."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import ConsoleMessage, Dialog, Page, Request, async_playwright, expect

from lightning_proxy.store.store import Store
from lightning_proxy.store.training import CallCredit
from support.paths import has

files = pytest.importorskip("lightning_proxy.features.page.proxy").files  # where the page was deleted
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

needs_browser = pytest.mark.skipif(PATH is None, reason=f"no browser on PATH ({', '.join(NAMES)}) or in CHROMIUM")

# The browser's own words for an answer of 400 or more, which no script can keep it from saying.
REFUSED = "Failed to load resource: the server responded with a status of "


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[tuple[Page, list[str]]]:
    """A page of its own profile, and what goes wrong in it. `options`: of playwright's `new_page`.

    Wrong are dialogs, scripts' errors, refused policies, and requests to others than the proxy.
    """
    wrong: list[str] = []

    async def on_dialog(dialog: Dialog) -> None:
        wrong.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REFUSED):
            wrong.append(f"console: {message.text}")

    def on_request(request: Request) -> None:
        if not request.url.startswith((url, "data:")):
            wrong.append(f"request: {request.url}")

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        try:
            page = await browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | options)
            page.set_default_timeout(10_000)
            page.on("dialog", on_dialog)
            page.on("console", on_console)
            page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
            page.on("request", on_request)
            await page.goto(url)
            yield page, wrong
        finally:
            await browser.close()


HERE = Path(__file__).with_name("page_in_node.mjs")


def unpacked(directory: Path) -> Path:
    """Write the page's files, as the proxy serves them, into a folder."""
    for name, body in files().items():
        path = directory / "page" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return directory / "page"


async def in_node(*argv: str | Path, said: Any) -> Any:
    """Run a module in node, which reads JSON and prints JSON."""
    if shutil.which("node") is None:
        pytest.skip("no node on PATH")
    process = await asyncio.create_subprocess_exec("node", *map(str, argv), stdin=PIPE, stdout=PIPE, stderr=PIPE)
    out, problems = await asyncio.wait_for(process.communicate(json.dumps(said).encode()), 120)
    assert process.returncode == 0, problems.decode()
    return json.loads(out)


async def drawn(system: Any, directory: Path, *places: Any, key: str = "") -> Any:
    """What these places of the page show, each after the buttons that follow its address were pressed."""
    wanted = [[place] if isinstance(place, str) else place for place in places]
    found = await in_node(HERE, unpacked(directory), system.url, key, said=wanted)
    assert [one["problems"] for one in found] == [[]] * len(found)
    return found


EQUAL = "all rewards of the group are equal"
CALCULATOR = {"name": "calculator", "arguments": '{"expression": "17 * 23 + 4"}'}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALCULATOR}]}
ASKED = [
    {"role": "system", "content": "Use the calculator for sums."}, {"role": "user", "content": "What is 17*23+4?"},
]  # fmt: skip
SAID = {"role": "assistant", "content": "It is 395."}
TURNS = (ASKED, [*ASKED, CALLS, {"role": "tool", "tool_call_id": "c", "content": "395"}])


async def rewarded(system: Any, name: str, task: str, reward: float, headers: Any) -> None:
    """A rollout of two calls, the first of a tool."""
    for messages in TURNS:
        body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": CALCULATOR}]}
        path = f"/rollouts/{name}/tasks/{task}/agents/solver/v1/chat/completions"
        await system.post(path, body, **headers)
    posted = {"rollout_id": name, "reward": reward, "source": "env", "comment": "the number is compared"}
    await system.post("/reward", posted, **headers)


async def learn(system: Any, store: Store, number: int, headers: Any) -> None:
    """A step of 4 tasks with 4 siblings each, of which the first is never solved, the second always."""
    better = (number + 1) / STEPS
    rewards = {"never": [0.0] * 4, "always": [1.0] * 4, "add": [1.0, better, 0.4, 0.0], "multiply": [0.0, better] * 2}
    groups = {task: [f"{task}-{number}-{i}" for i in range(4)] for task in rewards}
    for task, names in groups.items():
        for name, reward in zip(names, rewards[task], strict=True):
            await rewarded(system, name, task, reward, headers)
        await rewarded(system, f"held-{task}-{number}", task, better, headers | {"X_Rollout_Mode": "eval"})
    never, always, *taken = groups.values()
    names = [name for group in taken for name in group]
    rows = enumerate(("first", "merged"))
    credit = [CallCredit(name, seq, better, 0.5, 0, row) for seq, row in rows for name in names]
    step = await store.steps.claim(names, number, {EQUAL: never + always}, [*groups.values()], credit)
    metrics = {"reward_mean": better, "reward_std": 0.4, "reward_min": 0.0, "reward_max": 1.0}
    await store.steps.trained(step, None, metrics)
    version = await store.versions.new("merged", step, {})
    path = system.vllm.root / f"v{version}"
    path.mkdir()
    await store.versions.saved(version, str(path), "base")
    await store.versions.set_live(version, step, verified=True)


STEPS = 6
HREFS = "all => all.map(one => one.getAttribute('href'))"
VIEWS = {
    "overview": "Reward by training step",
    "rollouts": "multiply-5-3",
    "rollouts/multiply-4-1": "Trained in step 5",
    "tasks": "multiply",
    "versions": "Version 6 is live",
    "versions?a=0&b=5": "paired tasks",
}
VIEWS |= {"rate": "Enter your name"} if has("judge") else {}
VIEWS |= {"prompts": "No prompts yet"} if has("prompts") else {}


@asynccontextmanager
async def learned(start: Any, **proxy: Any) -> AsyncIterator[Any]:
    """A system with a policy that learned in a few steps."""
    headers = {"Authorization": "Bearer agent"} if proxy else {}
    async with start(**proxy) as system, system.store() as store:
        system.vllm.answer = lambda body: CALLS if body["messages"] == ASKED else SAID
        for number in range(STEPS):
            await learn(system, store, number, headers)
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


def byte_tokenizer(directory: Path) -> Any:
    """A model's tokenizer to which a byte is a token, in its folder; what gives the ids of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.save(str(directory / "tokenizer.json"))
    return lambda text: list(bpe.encode(text).ids)


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


ELEMENT = {"type": "img", "props": {"src": "x", "onerror": "window.hurt = 1"}, "key": None, "ref": None, "__v": 1}


async def say_everything(system: Any) -> None:
    """Calls, tools, events, rewards and errors of one rollout; every free text is hostile."""
    named = {"X_Task_Id": "javascript:task", "X_Agent_Name": "constructor"}
    route = "/rollouts/javascript:hurt"
    for i, text in enumerate(HOSTILE):
        called = {"id": f"c{i}", "type": "function", "function": {"name": text[:200], "arguments": text}}
        system.vllm.answer = lambda _, text=text, called=called: {
            "role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [called], "refusal": text,
        }  # fmt: skip
        parts = [
            {"type": "text", "text": text}, {"type": text[:99], "x": text}, {"type": "image_url", "image_url": text},
        ]  # fmt: skip
        odd = [{"role": text, "content": text}, {"role": "user", "content": parts}]
        result = {"role": "tool", "tool_call_id": f"c{i - 1}", "content": text, "name": text[:99]}
        body = {"model": "policy", "messages": [*odd, result] if i else odd}
        await system.post(f"{route}/v1/chat/completions", body, **named)
        event = {"kind": "action", "name": text[:99], "arguments": text, "result": text}
        await system.call("POST", f"{route}/events", event)
        posted = {"rollout_id": "javascript:hurt", "reward": i / 9, "final": False, "comment": text[:999]}
        await system.call("POST", "/reward", posted | {"source": text[:99], "name": text[:99]})
    for body in ({"model": "policy", "messages": HOSTILE}, {"model": HOSTILE[0], "messages": [None, 1, [HOSTILE[1]]]}):
        await system.call("POST", f"{route}/v1/chat/completions", body, **named)
    event = {"kind": "action", "name": "element", "arguments": ELEMENT, "result": ELEMENT | {"constructor": None}}
    await system.post(f"{route}/events", event)
    found = await system.get(route)
    assert len(found["calls"]) >= len(HOSTILE) and found["rewards"]
