"""The same recorded rollouts in SQLite and in PostgreSQL, by one process and by two: the same rows and update."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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
from support.command_line import lightning
from support.paths import ROOT
from support.postgres import postgres_server
from support.ranks import VOCABULARY, make_model, trainer
from support.sections import TrainerConfig

TASKS, SIBLINGS, TURNS = 3, 4, 3
STORES = ("sqlite", "postgres")
MEASURED = ("loss", "grad_norm", "ratio_mean", "entropy", "trained_tokens", "clip_share")


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
    """What `accelerate launch test_both_stores.py DIRECTORY URL OUT` does in each of its processes."""
    ranks = Ranks()
    learner = trainer(directory, processes=ranks)
    if ranks.rank:
        ranks.follow(learner)
        return
    torch.save(step(learner, asyncio.run(collect(url))), out)
    ranks.end()


def in_two_processes(directory: Path, url: str, out: Path) -> None:
    config = ROOT / "examples/distributed/cpu.yaml"
    program = [__file__, str(directory), url, str(out)]
    paths = {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *program],
        env={**os.environ, **paths}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], Any]]:
    """By store and number of processes, the step on the rollouts that both hold. Each claim needs its own store."""
    directory = tmp_path_factory.mktemp("stores")
    make_model(directory / "model")
    recorded = f"sqlite:///{directory}/recorded.db"
    asyncio.run(record(recorded))
    found: dict[tuple[str, int], Any] = {}
    with postgres_server() as server:
        for processes in (1, 2):
            urls = {"postgres": server.new_database(), "sqlite": f"sqlite:///{directory}/{processes}.db"}
            for source, target in ((recorded, urls["postgres"]), (urls["postgres"], urls["sqlite"])):
                done = lightning("store", "migrate", source, target)
                assert done.returncode == 0, done.stderr
            for store, url in urls.items():
                if processes == 1:
                    found[store, 1] = step(trainer(directory), asyncio.run(collect(url)))
                else:
                    out = directory / f"{store}.pt"
                    in_two_processes(directory, url, out)
                    found[store, 2] = torch.load(out, weights_only=False)
        yield found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [1, 2])
def test_both_stores_give_the_same_rows(steps: dict[tuple[str, int], Any], processes: int) -> None:
    rows = [steps[store, processes]["samples"] for store in STORES]
    assert rows[0] == rows[1] == steps["sqlite", 1]["samples"]
    assert len(rows[0]) == TASKS * SIBLINGS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [1, 2])
def test_both_stores_give_the_same_update(steps: dict[tuple[str, int], Any], processes: int) -> None:
    """To rounding: two processes add up their gradients in another order."""
    first, own = steps["sqlite", 1], steps["postgres", processes]
    for store in STORES:
        for name, weight in first["adapter"].items():
            torch.testing.assert_close(steps[store, processes]["adapter"][name], weight, rtol=1e-4, atol=2e-5)
    assert {k: own["metrics"][k] for k in MEASURED} == pytest.approx(
        {k: first["metrics"][k] for k in MEASURED}, rel=1e-3
    )
    assert any(weight.abs().max() > 0 for name, weight in first["adapter"].items() if "lora_B" in name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
