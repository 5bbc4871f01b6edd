"""How the store does as it grows: `python benchmarks/store.py --calls 1000000`, about ten minutes.

Fills a store through the real recorder with rollouts of several turns (system prompt, tools, tool calls, token ids,
log-probabilities, rewards) while a trainer claims what has ended, and after each `--every` calls measures, at rest,
what must not become slower. With `--store FILE` it goes on from what the file holds already.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.control.views import rollout_detail
from lightning_proxy.proxy.json_text import dumps
from lightning_proxy.proxy.recording.recorder import Recorder
from lightning_proxy.proxy.store.database import Database, opened
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.store.waiting import Group
from lightning_proxy.proxy.types import CallEnd, CallStart, Choice, Reward, RolloutName, ToolCall

AT_ONCE = 64  # rollouts
SIBLINGS = 8
TASKS_PER_STEP = 8
REPEATS = 15
WORDS = ["amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lemur"]
SOURCE = random.Random(0)
TEXTS = [" ".join(SOURCE.choices(WORDS, k=60)) for _ in range(1000)]
SYSTEM = {"role": "system", "content": " ".join(SOURCE.choices(WORDS, k=250))}
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string", "description": TEXTS[0]}}}
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": PARAMETERS}} for i in range(4)]
IDS = tuple(SOURCE.choices(range(150_000), k=20_000))
LOGPROBS = tuple(-SOURCE.random() for _ in range(20_000))


@dataclass
class Filler:
    """Records rollouts, `AT_ONCE` at a time, until so many calls are there."""

    store: Store
    recorder: Recorder
    rollouts: int
    calls: int
    ended: list[str] = field(default_factory=list)

    async def fill(self, calls: int) -> None:
        await asyncio.gather(*(self._work(calls) for _ in range(AT_ONCE)))

    async def _work(self, calls: int) -> None:
        while self.calls < calls:
            number, self.rollouts = self.rollouts, self.rollouts + 1
            await self._rollout(number)

    async def _rollout(self, number: int) -> None:
        source = random.Random(number)
        rollout_id = f"{source.getrandbits(128):032x}"
        agent = "reviewer" if number % 1000 == 0 else "planner"
        mode = "eval" if number % 1000 < 40 else "train"
        name = RolloutName(rollout_id, f"task-{number // SIBLINGS}", agent, mode)
        messages: list = [SYSTEM, {"role": "user", "content": source.choice(TEXTS)}]
        prompt = IDS[:400]
        for turn in range(source.randint(4, 12)):
            prompt, answer = await self._turn(name, turn, messages, prompt, source)
            messages = [*messages, *answer]
        if number % 100 == 0:
            await self.store.rollouts.end(rollout_id, "failed", "the benchmark says so")
        else:
            await self.store.rewards.post([Reward(rollout_id, source.random(), final=True)], None, b"")
        self.ended = [*self.ended[-99:], rollout_id]

    async def _turn(
        self, name: RolloutName, turn: int, messages: list, prompt: tuple[int, ...], source: random.Random
    ) -> tuple[tuple[int, ...], list]:
        """One call; the prompt of the next one, and what its conversation gains."""
        self.calls += 1
        call_id, at = f"{name.rollout_id}-{turn}", source.randrange(10_000)
        tool = ToolCall(f"call_{source.getrandbits(64):x}", "tool_1", dumps({"query": source.choice(TEXTS)[:100]}))
        function = {"name": tool.name, "arguments": tool.arguments}
        calls = [{"id": tool.id, "type": "function", "function": function}]
        message = {"role": "assistant", "content": source.choice(TEXTS)[:200], "tool_calls": calls}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 80, "total_tokens": len(prompt) + 80}
        choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
        response = {"id": f"chatcmpl-{call_id}", "object": "chat.completion", "model": "m", "choices": choices}
        request = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 1.0, "stream": True}
        await self.recorder.start(CallStart(call_id, name, "chat/completions", "m", 0, request, time.time()))
        sampled = Choice(0, IDS[at : at + 80], LOGPROBS[at : at + 80], "tool_calls")
        await self.recorder.end(
            CallEnd(
                call_id, name.rollout_id, "ok", response | {"usage": usage}, 200, prompt, (sampled,), usage, (tool,),
                ttft_ms=20.0, latency_ms=900.0,
            )
        )  # fmt: skip
        result = {"role": "tool", "tool_call_id": tool.id, "content": source.choice(TEXTS)}
        return prompt + sampled.token_ids + IDS[at : at + 100], [message, result]


async def train(store: Store, done: asyncio.Event) -> None:
    """Take steps as a trainer does, as long as there are enough groups; a few are left to claim."""
    while not done.is_set():
        ready = [group for group in await store.waiting.groups() if group.ended >= SIBLINGS - 1]
        for first in range(0, len(ready) - 2 * TASKS_PER_STEP, TASKS_PER_STEP):
            await step(store, ready[first : first + TASKS_PER_STEP])
        await asyncio.sleep(0.1)


async def step(store: Store, groups: list[Group]) -> None:
    rollouts = [one.rollout_id for group in groups for one in await store.waiting.of_group(group)]
    await store.steps.trained(await store.steps.claim(rollouts, 0), None, {"reward_mean": 0.5})


async def figures(store: Store, filler: Filler, path: Path) -> dict[str, float]:
    """Median milliseconds of each, with nothing else running, and the file's size."""
    _, middle = await store.rollouts.page({}, 1, filler.rollouts // 2)
    pages: dict[str, tuple[dict[str, str], int | None]] = {
        "page": ({}, None),
        "deep": ({}, middle),
        "status": ({"status": "failed"}, None),
        "task": ({"task_id": f"task-{filler.rollouts // 2 // SIBLINGS}"}, None),
        "agent": ({"agent": "reviewer"}, None),
        "mode": ({"mode": "eval"}, None),
    }
    found = {
        name: await timed(lambda f=filters, c=cursor: store.rollouts.page(f, 100, c))
        for name, (filters, cursor) in pages.items()
    }

    async def rollout() -> None:
        rollout_id = random.choice(filler.ended)
        calls, rewards = await store.calls.of(rollout_id), await store.rewards.of(rollout_id)
        dumps(rollout_detail(await store.rollouts.get(rollout_id), calls, rewards))

    async def claim() -> None:
        groups = await store.waiting.groups()
        await step(store, [group.task_id for group in groups[:1]])

    found["rollout"] = await timed(rollout)
    found["groups"] = await timed(store.waiting.groups)
    found["step"] = await timed(claim)
    found["counts"] = await timed(store.rollouts.counts)
    size = sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))
    return found | {"GiB": size / 2**30, "B/call": size / filler.calls}


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        await work()
        took.append(1000 * (time.perf_counter() - began))
    return median(took)


async def count(database: Database) -> tuple[int, int]:
    (row,) = await database.all("SELECT (SELECT COUNT(*) FROM rollouts) AS r, (SELECT COUNT(*) FROM calls) AS c")
    return row["r"], row["c"]


async def run(path: Path, calls: int, every: int) -> list[dict[str, float]]:
    config, rows = StoreConfig(url=f"sqlite:///{path}"), []
    async with opened(config) as database, opened(config) as trainers:
        store, trainer_store = Store(database), Store(trainers)
        async with Recorder(store, merged=False) as recorder:
            filler = Filler(store, recorder, *await count(database))
            while filler.calls < calls:
                done, before, began = asyncio.Event(), filler.calls, time.perf_counter()
                training = asyncio.create_task(train(trainer_store, done))
                await filler.fill(min(calls, (before // every + 1) * every))
                per_s = (filler.calls - before) / (time.perf_counter() - began)
                done.set()
                await training
                rows.append({"calls": filler.calls, "calls/s": per_s, **await figures(store, filler, path)})
                print(" ".join(f"{name}={shown(value)}" for name, value in rows[-1].items()), flush=True)
    return rows


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def show(rows: list[dict[str, float]]) -> None:
    table = Table(title=f"milliseconds unless said otherwise; {os.cpu_count()} cores", box=None)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(shown, row.values()))
    table.add_section()
    table.add_row("last / first", *(f"{rows[-1][name] / rows[0][name]:.2f}" for name in list(rows[0])[1:]))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000, help="in the store at the end")
    parser.add_argument("--every", type=int, default=100_000, help="calls between two measurements")
    parser.add_argument("--store", type=Path, help="a file to keep and to go on with; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(run(options.store or Path(directory) / "store.db", options.calls, options.every))
    if rows:
        show(rows)


if __name__ == "__main__":
    main()
