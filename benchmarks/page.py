"""How long the routes that the page reads take with a long run in the store: `make bench-page`, half a minute.

Fills a store with rollouts of a few calls each, and with training steps that took them, starts a real proxy on it, and
asks each route over HTTP, with nothing else running. /healthz is the floor. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from results_page import Page, option
from servers import Server
from targets import start_proxy, start_upstream

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.json_text import dumps
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.store.training import CallCredit, ComparedGroup
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, Reward, RolloutName, ToolCall
from lightning_proxy.trainer.report.batch_metrics import TASKS_KEPT
from lightning_proxy.trainer.report.metric_schema import METRICS

LIMIT_MS, LIMIT_OF_CALLS_MS = 200.0, 1000.0  # /costs reads all calls
ASKED = 5  # times
AT_ONCE = 64  # rollouts
SIBLINGS = 8
HELD_OUT = 5  # of so many groups, one
TURNS = 4
ADDED = 180  # tokens of an answer and of what comes back: 80 and 100
SOURCE = random.Random(0)
TEXTS = [" ".join(SOURCE.choices(["amber", "basin", "cedar", "delta", "ember", "fjord"], k=60)) for _ in range(500)]
SYSTEM = {"role": "system", "content": " ".join(TEXTS[:4])}
IDS = tuple(SOURCE.choices(range(150_000), k=400 + TURNS * ADDED))


class Run:
    """A run of so many rollouts: groups of siblings, of which a step took each but the held-out ones."""

    def __init__(self, store: Store, recorder: Recorder, rollouts: int, tasks: int, steps: int) -> None:
        self.store, self.recorder = store, recorder
        self.groups = [range(first, first + SIBLINGS) for first in range(0, rollouts, SIBLINGS)]
        self.tasks, self.steps = tasks, steps

    async def fill(self) -> None:
        left = asyncio.Semaphore(AT_ONCE)

        async def one(group: int, number: int) -> None:
            async with left:
                await self._rollout(group, number)

        await asyncio.gather(*(one(i, number) for i, group in enumerate(self.groups) for number in group))
        trained = [i for i in range(len(self.groups)) if not self._held_out(i)][: self.steps]
        for i in trained:
            await self._step(i)
        await self.store.versions.set_live(0)

    def _held_out(self, group: int) -> bool:
        return group % HELD_OUT == HELD_OUT - 1

    def _version(self, group: int) -> int:
        """The version that was live then: each step made one. Held-out groups are of the first or the last, in turn."""
        if self._held_out(group):
            return group // HELD_OUT % 2 * self.steps
        return group - group // HELD_OUT

    def _task(self, group: int) -> str:
        return f"task-{(group // HELD_OUT // 2 if self._held_out(group) else group) % self.tasks}"

    async def _rollout(self, group: int, number: int) -> None:
        mode = "eval" if self._held_out(group) else "train"
        name = RolloutName(f"rollout-{number}", self._task(group), "planner", mode)
        source, messages = random.Random(number), [SYSTEM, {"role": "user", "content": TEXTS[group % len(TEXTS)]}]
        for turn in range(TURNS):
            messages = await self._turn(name, turn, self._version(group), messages, source)
        reward = float(source.random() < (group + len(self.groups)) / (3 * len(self.groups)))
        await self.store.rewards.post([Reward(name.rollout_id, reward)], None, b"")

    async def _turn(
        self, name: RolloutName, turn: int, version: int, messages: list[Any], source: random.Random
    ) -> list[Any]:
        call_id, prompt = f"{name.rollout_id}-{turn}", IDS[: 400 + turn * ADDED]
        request = {"model": "policy", "messages": messages, "temperature": 1.0}
        tool = ToolCall(f"call-{call_id}", "search", dumps({"query": source.choice(TEXTS)[:80]}))
        function = {"name": tool.name, "arguments": tool.arguments}
        calls = [{"id": tool.id, "type": "function", "function": function}]
        message = {"role": "assistant", "content": source.choice(TEXTS), "tool_calls": calls}
        response = {"id": call_id, "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 80}
        answer = IDS[len(prompt) : len(prompt) + 80]
        if turn == TURNS - 1:  # where siblings part
            answer = tuple(source.choices(range(150_000), k=80))
        sampled = Choice(0, answer, tuple(-source.random() for _ in answer), "tool_calls")
        await self.recorder.start(CallStart(call_id, name, "chat/completions", "m", version, request, time.time()))
        ended = CallEnd(call_id, name.rollout_id, "ok", response, 200, prompt, (sampled,), usage, (tool,))
        await self.recorder.end(ended._replace(ttft_ms=30 * source.random(), latency_ms=900 * source.random()))
        return [*messages, message, {"role": "tool", "tool_call_id": tool.id, "content": source.choice(TEXTS)}]

    async def _step(self, group: int) -> None:
        """A step that takes a group, and the version that it is published as."""
        store, source = self.store, random.Random(group)
        rollout_ids = [f"rollout-{number}" for number in self.groups[group]]
        credit = [
            CallCredit(name, turn, 1.0, source.gauss(0, 1), 0, "merged" if turn else "first")
            for name in rollout_ids
            for turn in range(TURNS)
        ]
        together = [ComparedGroup(self._task(group), rollout_ids)]
        step = await store.steps.claim(rollout_ids, self._version(group), groups=together, credit=credit)
        metrics: dict[str, Any] = {name: source.random() for name in METRICS}
        version = await store.versions.new("lora", step, metrics)
        seen = {"mean": 0.5, "std": 0.25, "rollouts": 8.0}
        by_task = {f"task-{i}": seen for i in range(min(self.tasks, TASKS_KEPT))}
        await store.steps.trained(step, f"/checkpoints/{step}", metrics | {"reward_by_task": by_task})
        await store.versions.saved(version, f"/versions/v{version}", f"policy-v{version}")
        await store.versions.set_live(version, step, verified=True)


async def fill(config: StoreConfig, rollouts: int, tasks: int, steps: int) -> None:
    async with opened(config) as database:
        store = Store(database)
        async with Recorder(store, merged=False) as recorder:
            await Run(store, recorder, rollouts, tasks, steps).fill()


def ask(server: Server, paths: list[str]) -> list[tuple[str, float, int]]:
    """Each path with the median of its milliseconds, to the last byte, and the bytes of its answer."""
    connection, found = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60), []
    for path in paths:
        took = []
        for _ in range(ASKED):
            began = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            size = len(answer.read())
            took.append(1000 * (time.perf_counter() - began))
            if answer.status != 200:
                raise SystemExit(f"GET {path}: {answer.status}")
        found.append((path, median(took), size))
    connection.close()
    return found


def routes(rollouts: int, steps: int) -> list[str]:
    last = f"/rollouts/rollout-{min(rollouts, steps * SIBLINGS) // 2}"
    return [
        "/healthz",
        "/status",
        "/tasks",
        "/tasks?sort=spread&limit=1000",
        "/rollouts",
        "/rollouts?words=true",
        "/rollouts?limit=1000",
        last,
        f"{last}/rows",
        "/costs",
        "/policy",
        "/policy/versions",
        "/policy/steps",
        "/policy/steps?limit=1000&brief=true",
        f"/policy/compare?a=0&b={steps}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="how long the routes of the page take")
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1_000)
    option(parser, "page")
    args = parser.parse_args()
    page = Page("How long the routes of the page take")
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory) / "proxy"
        here.mkdir()
        asyncio.run(fill(StoreConfig(url=f"sqlite:///{here}/store.db"), args.rollouts, args.tasks, args.steps))
        upstream = start_upstream()
        proxy = start_proxy(here, upstream.url)
        try:
            proxy.settle()
            asked = ask(proxy, routes(args.rollouts, args.steps))
        finally:
            proxy.stop()
            upstream.stop()
    floor = asked[0][1]
    page.table(
        f"{args.rollouts:,} rollouts of {args.tasks} tasks, {args.steps:,} steps; medians of {ASKED}:",
        ("route", "ms", "beside /healthz", "kB"),
        ((f"`GET {at}`", f"{ms:.1f}", f"{ms / floor:.0f}", f"{size / 1000:,.0f}") for at, ms, size in asked),
    )
    page.save(args.page)
    limits = {"/costs": LIMIT_OF_CALLS_MS}
    if slow := [path for path, took, _ in asked if took > limits.get(path, LIMIT_MS)]:
        raise SystemExit(f"too slow: {', '.join(slow)}")


if __name__ == "__main__":
    main()
