"""The page's views over a history of learning, and what each of them shows."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import re
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from aiohttp import web
from playwright.async_api import ConsoleMessage, Dialog, Page, Request, async_playwright, expect

from lightning_proxy.features import FEATURES
from lightning_proxy.store.store import Store
from lightning_proxy.store.training import CallCredit

files = pytest.importorskip("lightning_proxy.features.page.proxy").files  # where the page was deleted
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

needs_browser = pytest.mark.skipif(PATH is None, reason=f"no browser on PATH ({', '.join(NAMES)}) or in CHROMIUM")

# The browser's own words for an answer of 400 or more, which no script can keep it from saying.
REFUSED = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")


@dataclass
class Wrong:
    """What went wrong: dialogs, scripts' errors, refused policies, requests to others than the proxy."""

    seen: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)  # statuses of answers that were errors

    def watch(self, page: Page, origin: str) -> None:
        async def on_dialog(dialog: Dialog) -> None:
            self.seen.append(f"dialog: {dialog.message}")
            await dialog.dismiss()

        def on_console(message: ConsoleMessage) -> None:
            if refused := REFUSED.match(message.text):
                self.refused.append(int(refused[1]))
            elif message.type in ("error", "warning"):
                self.seen.append(f"console: {message.text}")

        def on_request(request: Request) -> None:
            if not request.url.startswith((origin, "data:")):
                self.seen.append(f"request: {request.url}")

        page.on("dialog", on_dialog)
        page.on("console", on_console)
        page.on("pageerror", lambda error: self.seen.append(f"error: {error}"))
        page.on("request", on_request)


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[tuple[Page, Wrong]]:
    """A page of its own profile, and what goes wrong in it. `options`: of playwright's `new_page`."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        try:
            page, wrong = await browser.new_page(**{"viewport": {"width": 1280, "height": 800}} | options), Wrong()
            page.set_default_timeout(10_000)
            wrong.watch(page, url.partition("#")[0])
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


async def drawn(system: Any, directory: Path, *places: str | tuple[str, ...], key: str = "") -> list[dict[str, Any]]:
    """What these places of the page show, each after the buttons that follow its address were pressed."""
    wanted = [[place] if isinstance(place, str) else place for place in places]
    found: list[dict[str, Any]] = await in_node(HERE, unpacked(directory), system.url, key, said=wanted)
    assert [one["problems"] for one in found] == [[]] * len(found)
    return found


Json = dict[str, Any]
EQUAL = "all rewards of the group are equal"
TASKS = 12
ALIKE = {0: 0.0, 1: 1.0}  # tasks that are never solved, or always
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
SYSTEM = "You are a careful assistant. Use the calculator for sums."
SAID = (
    "The product is 391 and adding 4 makes 395 . I have checked it with the calculator , which says the same , "
    "so that is the right answer to this question"
)


class Learning:
    """Steps of 4 tasks with 4 siblings each; their rewards rise. Task 0 is never solved, task 1 always."""

    def __init__(self, system: Any, store: Store, headers: dict[str, str] | None = None) -> None:
        self._system, self._store, self._headers = system, store, headers or {}
        self._random = random.Random(0)
        self._ids = itertools.count()
        system.vllm.odd = self.answer

    async def step(self, number: int, of: int, directory: Path) -> None:
        """One training step: its rollouts, held-out evaluations, the step itself, and the version that it makes."""
        solved = _solved(number / of)
        version = (await self._store.versions.live()).version
        groups = [await self.group(number, task, solved) for task in range(4)]
        for task in range(3):
            name = f"held-{number:03}-{task}"
            await self.rollout(name, f"sum-{task}", solved, mode="eval")
        taken = [group for group in groups if len({reward for _, reward in group}) > 1]
        compared = [[name for name, _ in group] for group in groups]
        credit = [one for group in taken for one in _credit(group)]
        names = [name for group in taken for name, _ in group]
        dropped = {EQUAL: [name for group in groups if group not in taken for name, _ in group]}
        step = await self._store.steps.claim(names, version, dropped, compared, credit)
        new = await self._store.versions.new("merged", step, {})
        await self._store.steps.trained(step, None, self.metrics(groups, solved, number, new))
        path = directory / f"v{new}"
        path.mkdir()
        await self._store.versions.saved(new, str(path), "base")
        await self._store.versions.set_live(new, step, verified=True)

    async def group(self, number: int, task: int, solved: float) -> list[tuple[str, float]]:
        names = [f"run-{number:03}-{task}-{sibling}" for sibling in range(4)]
        kind = (3 * number + task) % TASKS
        chances = [ALIKE[kind]] * 4 if kind in ALIKE else [1.0, solved, solved, 0.0]
        task_id = f"multiply-{kind:02}"
        return [(name, await self.rollout(name, task_id, one)) for name, one in zip(names, chances, strict=True)]

    async def rollout(self, name: str, task_id: str, solved: float, mode: str = "train") -> float:
        """A rollout of two calls, the first of a tool; its reward."""
        headers = self._headers | {"X-Task-Id": task_id, "X-Rollout-Mode": mode, "X-Agent-Name": "solver"}
        messages: list[Json] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 17*23+4?"}]
        body = {"model": "policy", "messages": messages, "tools": [CALCULATOR]}
        path = f"/rollouts/{name}/v1/chat/completions"
        _, answer = await self._system.call("POST", path, body, **headers)
        said = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "395"}
        await self._system.call("POST", path, body | {"messages": [*messages, said, result]}, **headers)
        reward = 1.0 if self._random.random() < solved else round(0.4 * self._random.random() * solved, 1)
        comment = "the answer is right" if reward == 1.0 else "no number in the answer"
        posted = {"rollout_id": name, "reward": reward, "source": "env", "comment": comment}
        assert (await self._system.call("POST", "/reward", posted, **self._headers))[0] == 200
        return reward

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """vLLM's answer: a tool is called once, then words; their tokens follow the request's own."""
        if request.path != "/v1/chat/completions":
            raise web.HTTPNotFound
        body = await request.json()
        told = any(message["role"] == "tool" for message in body["messages"])
        said: Json = {"role": "assistant", "content": None}
        if told:
            begins, length = self._random.choice([0, 4, 9]), self._random.randint(6, 14)
            words = SAID.split()
            words = [*words[:3], *words[3 + begins : 3 + begins + length]]
            said["content"] = " ".join(words)
            tokens = [1000 + SAID.split().index(word) for word in words]
        else:
            call = {"name": "calculator", "arguments": '{"expression": "17 * 23 + 4"}'}
            said["tool_calls"] = [{"id": f"call-{next(self._ids)}", "type": "function", "function": call}]
            tokens = [*range(500, 512)]
        logprobs = [-self._random.expovariate(2.0) for _ in tokens]
        prompt = [*range(1, 30), *([*range(500, 512), *range(30, 40)] if told else [])]
        choice = {"index": 0, "message": said, "finish_reason": "stop" if told else "tool_calls", "token_ids": tokens}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": logprob} for logprob in logprobs]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage["total_tokens"] = len(prompt) + len(tokens)
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "base", "choices": [choice]}
        return web.json_response(answer | {"usage": usage, "prompt_token_ids": prompt})

    def metrics(self, groups: Sequence[Sequence[tuple[str, float]]], solved: float, number: int, version: int) -> Json:
        rewards = [reward for group in groups for _, reward in group]
        noise = self._random.random
        return {
            "reward_mean": fmean(rewards), "reward_std": pstdev(rewards), "reward_min": min(rewards),
            "reward_max": max(rewards), "entropy": 2.2 * (1 - solved) + 0.3 + 0.1 * noise(), "kl": 0.004 * noise(),
            "kl_base": 0.02 * number + 0.02 * noise(), "grad_norm": 0.2 + 0.4 * noise(),
            "trained_tokens_per_s": 90 + 20 * noise(), "computed_tokens_per_s": 900 + 200 * noise(), "memory_gib": 3.5,
            "passes_halved": 0, "clip_share": 0.02 * noise(), "staleness_mean": round(noise()), "version": version,
            "verify_difference": 0.002 * noise(), "reward_by_task": {},
        }  # fmt: skip


def _solved(progress: float) -> float:
    """The share of tasks that are solved after this share of the steps."""
    return 0.05 + 0.85 / (1 + math.exp(-8 * (progress - 0.45)))


def _credit(group: Sequence[tuple[str, float]]) -> list[CallCredit]:
    """GRPO's advantages: the first call begins a row, and the second one goes on with it."""
    rewards = [reward for _, reward in group]
    mean, std = fmean(rewards), pstdev(rewards) or 1.0
    return [
        CallCredit(name, seq, reward, (reward - mean) / std, 0, placed)
        for name, reward in group
        for seq, placed in enumerate(("first", "merged"))
    ]


Running = Callable[..., AbstractAsyncContextManager[Any]]

STEPS = 6
_LEFT_OUT = {"judge", "prompts"} - {*FEATURES}
HREFS = "all => all.map(one => one.getAttribute('href'))"
_FEATURE = {"rate": "judge"}  # its view has another name
_VIEWS = {
    "overview": "Reward by training step",
    "rollouts": "run-005-3-3",
    "rollouts/run-004-2-1": "Trained in step 5",
    "tasks": "multiply-00",
    "versions": "Version 6 is live",
    "versions?a=0&b=5": "paired tasks",
    "rate": "Say who you are",
    "prompts": "No prompts yet",
}
VIEWS = {view: words for view, words in _VIEWS.items() if _FEATURE.get(view, view) not in _LEFT_OUT}


@asynccontextmanager
async def learned(running: Running, directory: Path, **proxy: Any) -> AsyncIterator[Any]:
    """A system with a policy that learned in a few steps."""
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


def byte_tokenizer(directory: Path) -> Callable[[str], list[int]]:
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


async def say_everything(system: Any) -> None:
    """Calls, tools, events, rewards and errors of one rollout; every free text is hostile."""
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
        posted = {"rollout_id": "javascript:hurt", "reward": i / 9, "final": False, "comment": text[:999]}
        await system.call("POST", "/reward", posted | {"source": text[:99], "name": text[:99]})
    for body in ({"model": "policy", "messages": HOSTILE}, {"model": HOSTILE[0], "messages": [None, 1, [HOSTILE[1]]]}):
        await system.call("POST", path, body, **rollout)
    element = {"type": "img", "props": {"src": "x", "onerror": "window.hurt = 1"}, "key": None, "ref": None, "__v": 1}
    event = {"kind": "action", "name": "element", "arguments": element, "result": element | {"constructor": None}}
    await system.call("POST", "/rollouts/javascript:hurt/events", event)
    _, found = await system.call("GET", "/rollouts/javascript:hurt")
    assert len(found["calls"]) >= len(HOSTILE)
    assert len(found["rewards"]) > 0
