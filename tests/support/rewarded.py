"""Rollouts with rewards in a real store, and what a step would take of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName, ToolCall
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.collector import Collector
from lightning_proxy.trainer.credit.strategies import group_credit
from lightning_proxy.trainer.types import Batch, Sibling
from support.sections import PolicyConfig, TrainerConfig
from support.stores import store_url


async def record(
    store: Store,
    name: str,
    answers: Sequence[str],
    reward: float,
    ids_of: Callable[[str], Sequence[int]] = lambda text: text.encode(),
) -> None:
    """A rewarded rollout of task `t`. Each prompt is what was before it; call i is named NAME-i."""
    said = "hi "
    async with Recorder(store, merged=False) as recorder:
        for i, answer in enumerate(answers):
            call_id, of = f"{name}-{i}", RolloutName(name, "t", None)
            await recorder.start(CallStart(call_id, of, "chat/completions", "policy", 0, {"n": i}, 1.0))
            ids = tuple(ids_of(answer))
            choice = Choice(0, ids, (-0.5,) * len(ids), "stop")
            await recorder.end(CallEnd(call_id, name, "ok", {}, 200, tuple(ids_of(said)), (choice,)))
            said += answer + "|"
    await store.rewards.post([Reward(name, reward)], None, b"")


async def train(store: Store) -> int:
    """Claim a group of two for a step; return the step."""
    return (await Traffic(store.database).taken()).step


def group_advantages(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float | None]]:
    return [[one and one.advantage for one in own] for own in group_credit(group, config)]


def group_returns(group: Sequence[Sibling], config: TrainerConfig) -> list[list[float | None]]:
    return [[one and one.returned for one in own] for own in group_credit(group, config)]


CALL = ToolCall("c", "calculator", "{}")
RESULT = {"role": "tool", "tool_call_id": "c", "content": "5"}


class Traffic:
    """Records rollouts in a store, and collects what a step would take."""

    def __init__(self, database: Database) -> None:
        self.store = Store(database)

    async def rollout(
        self, name: str, task: str | None, final: float | None, calls: Sequence[float] = (0.0,), *,
        status: str | None = None, reward_name: str = "reward", finish: str = "stop", tool: bool = False,
        version: int | list[int | None] | None = 0, agents: Sequence[str | None] | None = None,
        prompts: Sequence[tuple[int, ...]] | None = None, **end: Any,
    ) -> str:  # fmt: skip
        """A rollout with a call for each of the `calls`' rewards (0.0: none is posted); call i is named NAME-i.

        `tool`: each answer calls a tool, and the next request brings its result; only then the prompts continue.
        """
        async with Recorder(self.store, merged=False) as recorder:
            for i, value in enumerate(calls):
                call_id, request = f"{name}-{i}", {"messages": [{"role": "user", "content": f"step {i} of {name}"}]}
                request["messages"] += [RESULT] * (tool and i > 0)
                by = version[i] if isinstance(version, list) else version
                of, at = RolloutName(name, task, agents[i] if agents else None), time.time()
                await recorder.start(CallStart(call_id, of, "chat/completions", "policy", by, request, at))
                choice = Choice(0, (3, 4), (-1.0, -1.0), finish)
                answer = {"choices": [{"message": {"role": "assistant", "content": f"answer {i} of {name}"}}]}
                prompt = prompts[i] if prompts else (0, 5) + (3, 4, 7) * i if tool else (0, 5 + i)
                ended = CallEnd(call_id, name, "ok", answer, 200, prompt, (choice,))
                await recorder.end(ended._replace(**({"tool_calls": (CALL,)} if tool else {}), **end))
                if value:
                    await self.post(Reward(name, value, call_id, final=False))
        if final is not None:
            await self.post(Reward(name, final, name=reward_name))
        if status is not None or final is None:
            await self.store.rollouts.end(name, status or "completed", None)  # type: ignore[arg-type]
        return name

    async def rollouts(self, task: str | None, rewards: Mapping[str, float | None], **each: Any) -> list[str]:
        """A rollout of this task for each name."""
        return [await self.rollout(name, task, reward, **each) for name, reward in rewards.items()]

    async def open(self, task: str, *names: str) -> None:
        """Open siblings of a task together, as `POST /rollouts` does."""
        await self.store.rollouts.open([(RolloutName(name, task), f"hash of {name}") for name in names], {})

    async def post(self, reward: Reward) -> None:
        await self.store.rewards.post([reward], None, b"")

    def collector(self, *, adapters: Any = None, **changed: Any) -> Collector:
        settings = {"group_size": 2, "tasks_per_step": 1, "baseline": "dr_grpo", **changed}
        policy = PolicyConfig(adapters=adapters or {})
        return Collector(TrainerConfig.model_validate(settings), self.store, policy=policy)

    async def batch(self, live: int = 0, **changed: Any) -> Batch | None:
        return await self.collector(**changed).next_batch(live, fewer=True)

    async def taken(self, live: int = 0, **changed: Any) -> Batch:
        """What a step takes, which is something."""
        batch = await self.batch(live, **changed)
        assert batch is not None
        return batch

    async def dropped(self, *names: str) -> list[str | None]:
        return [(await self.store.rollouts.get(name)).dropped for name in names]


@pytest.fixture
async def traffic(tmp_path: Path) -> AsyncIterator[Traffic]:
    async with opened(StoreConfig(url=store_url(tmp_path))) as database:
        yield Traffic(database)


def advantages(batch: Batch | None) -> dict[str, float]:
    """By call id. Calls here have prompts that nothing continues, so each is a row of its own."""
    assert batch is not None
    return {sample.call_ids[0]: sample.advantages[-1] for sample in batch.samples}
