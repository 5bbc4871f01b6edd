"""A training step on what a store holds: `accelerate launch … step_of_store.py DIRECTORY URL OUT` on two processes."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.features.distributed.ranks import Ranks
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.collector import Collector
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch
from support.ranks import VOCABULARY, trainer
from support.sections import TrainerConfig

TASKS, SIBLINGS, TURNS = 3, 4, 3


async def record(url: str) -> None:
    """Record groups of rollouts whose calls go on from each other, with rewards for calls and rollouts."""
    source = random.Random(0)
    async with opened(StoreConfig(url=url)) as database, Recorder(store := Store(database), merged=False) as recorder:
        for task in range(TASKS):
            start = tuple(source.randrange(2, VOCABULARY) for _ in range(6))
            for sibling in range(SIBLINGS):
                name, prompt = RolloutName(f"{task}-{sibling}", f"task {task}"), start
                for turn in range(TURNS):
                    call_id, request = (
                        f"{task}-{sibling}-{turn}",
                        {"messages": [{"role": "user", "content": f"{turn}"}]},
                    )
                    given = CallStart(call_id, name, "chat/completions", "policy", 0, request, time.time())
                    await recorder.start(given)
                    ids = tuple(source.randrange(2, VOCABULARY) for _ in range(source.randrange(1, 7)))
                    choice = Choice(0, ids, tuple(-4 + source.gauss(0, 0.3) for _ in ids), "stop")
                    await recorder.end(CallEnd(call_id, name.rollout_id, "ok", {"id": call_id}, 200, prompt, (choice,)))
                    await store.rewards.post([Reward(name.rollout_id, source.random(), call_id, final=False)])
                    prompt = (*prompt, *ids, source.randrange(2, VOCABULARY))
                await store.rewards.post([Reward(name.rollout_id, source.random())])


async def collect(url: str) -> Batch:
    """Return what a step takes of the store."""
    settings: dict[str, Any] = {"group_size": SIBLINGS, "tasks_per_step": TASKS, "credit": "discounted"}
    async with opened(StoreConfig(url=url)) as database:
        config = TrainerConfig.model_validate(settings)
        batch = await Collector(config, Store(database), vocabulary=VOCABULARY).next_batch(0)
    assert batch is not None
    return batch


def step(learner: LightningTrainer, batch: Batch) -> dict[str, Any]:
    """Take the step; what it measured, and the weights after it."""
    metrics = learner.step(batch)
    return {"samples": batch.samples, "metrics": metrics, "adapter": learner.adapter()}


def main(directory: Path, url: str, out: Path) -> None:
    ranks = Ranks()
    learner = trainer(directory, processes=ranks)
    if ranks.rank:
        ranks.follow(learner)
        return
    torch.save(step(learner, asyncio.run(collect(url))), out)
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
