"""Fills a store for `store.py`: rollouts of several turns, one very long one, and as many steps as versions."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.json_text import dumps
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName, ToolCall
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.report.metric_schema import METRICS

AT_ONCE = 64  # rollouts
SIBLINGS = 8
TURNS = 8
LEFT = 4  # groups that no step has taken
KEPT = 8  # newest versions that still have files
CONTENT = 250_000  # characters of the long rollout
WORDS = ["amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jetty", "knoll", "lemur"]
SOURCE = random.Random(0)
TEXTS = [" ".join(SOURCE.choices(WORDS, k=60)) for _ in range(1000)]
SYSTEM = {"role": "system", "content": " ".join(SOURCE.choices(WORDS, k=250))}
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string", "description": TEXTS[0]}}}
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": PARAMETERS}} for i in range(4)]
IDS = tuple(SOURCE.choices(range(150_000), k=200_000))
LOGPROBS = tuple(-SOURCE.random() for _ in range(200_000))

STEPS = """
INSERT INTO steps (step, status, base, version, checkpoint, metrics, created_at, finished_at)
VALUES (:n, 'trained', :before, :n, :checkpoint, :metrics, :at, :at)
"""
VERSIONS = """
INSERT INTO policy_versions
    (version, status, publish, path, served_model, verified, step, created_at, live_at, metrics)
VALUES (:n, 'ready', 'lora', :path, :served, 1, :n, :at, :at, :metrics)
"""
LOG = "INSERT INTO policy_log (version, at) VALUES (:n, :at)"
TRAINED = """
UPDATE rollouts SET step = 1 + n % :versions, policy_version = n % :versions, group_id = n - n % :siblings
WHERE n <= (SELECT MAX(n) FROM rollouts) - :left
"""


@dataclass(frozen=True)
class Size:
    """How much there is: calls, versions (and steps), and turns of the long rollout."""

    calls: int
    versions: int
    turns: int


async def fill(config: StoreConfig, size: Size) -> None:
    """Fill an empty store. Rollouts are named r0, r1, …, the long one `long`."""
    async with opened(config) as database:
        store, left = Store(database), asyncio.Semaphore(AT_ONCE)
        async with Recorder(store, merged=False) as recorder:

            async def one(number: int) -> None:
                async with left:
                    await _rollout(store, recorder, f"r{number}", TURNS, random.Random(number), TEXTS[number % 1000])

            await _rollout(store, recorder, "long", size.turns, SOURCE, "x" * (CONTENT // size.turns // 4))
            await asyncio.gather(*map(one, range(size.calls // TURNS)))
        await _versions(store, size.versions)


async def _rollout(
    store: Store, recorder: Recorder, rollout_id: str, turns: int, source: random.Random, text: str
) -> None:
    number = int(rollout_id.removeprefix("r")) if rollout_id != "long" else 0
    mode = "eval" if number % 25 == 24 else "train"
    name = RolloutName(rollout_id, f"task-{number // SIBLINGS}", "planner", mode)
    messages: list[Any] = [SYSTEM, {"role": "user", "content": text}]
    prompt = IDS[:400]
    for turn in range(turns):
        prompt, answer = await _turn(recorder, name, turn, messages, prompt, source, text)
        messages = [*messages, *answer]
    await store.rewards.post([Reward(rollout_id, source.random(), final=True)], None, b"")


async def _turn(
    recorder: Recorder,
    name: RolloutName,
    turn: int,
    messages: list[Any],
    prompt: tuple[int, ...],
    source: random.Random,
    text: str,
) -> tuple[tuple[int, ...], list[Any]]:
    """One call; the prompt of the next one, and what its conversation gains."""
    call_id, at = f"{name.rollout_id}-{turn}", source.randrange(100_000)
    tool = ToolCall(f"call_{call_id}", "tool_1", dumps({"query": text[:100]}))
    calls = [{"id": tool.id, "type": "function", "function": {"name": tool.name, "arguments": tool.arguments}}]
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 80, "total_tokens": len(prompt) + 80}
    choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    response = {"id": f"chatcmpl-{call_id}", "object": "chat.completion", "model": "m", "choices": choices}
    request = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 1.0, "stream": True}
    await recorder.start(CallStart(call_id, name, "chat/completions", "m", 0, request, time.time()))
    sampled = Choice(0, IDS[at : at + 80], LOGPROBS[at : at + 80], "tool_calls")
    ended = CallEnd(
        call_id, name.rollout_id, "ok", response | {"usage": usage}, 200, prompt, (sampled,), usage, (tool,)
    )
    await recorder.end(ended._replace(ttft_ms=20.0, latency_ms=900.0))
    result = {"role": "tool", "tool_call_id": tool.id, "content": text}
    return prompt + sampled.token_ids + IDS[at : at + 100], [message, result]


async def _versions(store: Store, versions: int) -> None:
    """As many steps as versions, and their rollouts: all but a few groups."""
    metrics = dumps({name: 0.5 for name in METRICS if name != "method"} | {"skipped": False})
    now = time.time()
    rows = [
        {
            "n": n,
            "before": n - 1,
            "checkpoint": f"checkpoints/{n}" if n > versions - KEPT else None,
            "path": f"versions/v{n}" if n > versions - KEPT else None,
            "served": f"policy-v{n}",
            "metrics": metrics,
            "at": now - versions + n,
        }
        for n in range(1, versions + 1)
    ]
    taken = {"versions": versions, "siblings": SIBLINGS, "left": LEFT * SIBLINGS}
    await store.database.commit([(STEPS, rows), (VERSIONS, rows), (LOG, rows), (TRAINED, [taken])])
    await store.versions.set_live(0)  # which any upstream can serve
