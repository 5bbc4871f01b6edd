"""Rollouts whose tokens are bytes, as those of the fixtures' vLLM are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.collector import Collector
from support.sections import TrainerConfig


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
    settings = {"group_size": 2, "tasks_per_step": 1, "baseline": "dr_grpo"}
    batch = await Collector(TrainerConfig.model_validate(settings), store).next_batch(0, fewer=True)
    assert batch is not None
    return batch.step
