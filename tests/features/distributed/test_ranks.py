"""The trainer on two real processes: the same update as one, also where they have unequal work, and no silent end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_proxy.core.errors import ConfigError
from lightning_proxy.features.distributed.ranks import check, share_out
from lightning_proxy.trainer.rows.prefix_tree import TreeCost, micro_batches
from support.paths import EXAMPLES, TESTS
from support.ranks import FULL, OWN, batch, lead, make_model, trainer
from support.training import bench

COUNTS = ("trained_tokens", "ratio_mean", "ratio_max", "clip_share", "entropy", "loss", "grad_norm", "lr", "kl_base")
WAYS: dict[str, Any] = {"lora": {}, "full": FULL, "adapters": {"adapters": OWN}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    make_model(directory / "model")
    return directory


def worker(tmp_path: Path, directory: Path, what: str) -> subprocess.Popen[str]:
    """Two processes on the CPU as `examples/distributed` starts them; `…-fsdp`: with the base sharded as there."""
    config = yaml.safe_load((EXAMPLES / "distributed" / "cpu.yaml").read_text())
    if what.endswith("-fsdp"):
        sharded = yaml.safe_load((EXAMPLES / "distributed" / "fsdp2.yaml").read_text())
        config |= {key: sharded[key] for key in ("distributed_type", "fsdp_config")}
    path = tmp_path / "launcher.yaml"
    path.write_text(yaml.safe_dump(config))
    paths = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    program = [str(TESTS / "support" / "ranks.py"), what, str(directory)]
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), *program],
        env={**os.environ, **paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["plain", "fsdp"])
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one_does(directory: Path, tmp_path: Path, way: str, sharding: str) -> None:
    """Seven steps: unequal shares, a NaN that one rank meets, a single sample, none at all, before and after a load."""
    what, is_full, is_sharded = f"{way}-{sharding}", way == "full", sharding == "fsdp"
    (alone := tmp_path / "one").mkdir()
    one, process = lead(trainer(directory, **WAYS[way]), alone), worker(tmp_path, directory, what)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    two, other = (torch.load(directory / what / f"rank-{rank}.pt") for rank in (0, 1))
    assert (other["sharded"], other["recomputed"] > 0) == (is_sharded,) * 2, "a sharded base's layers are checkpointed"
    near: dict[str, float] = {"rtol": 1e-3, "atol": 2e-4} if is_full else {"rtol": 1e-4, "atol": 2e-5}
    for moment in ("kept", "moved", "again", "all"):
        torch.testing.assert_close(two[moment], one[moment], **near)
    if not (is_full and is_sharded):
        torch.testing.assert_close(other["all"], two["all"], rtol=0, atol=0)
    assert [m["skipped"] for m in two["metrics"]] == [m["skipped"] for m in one["metrics"]] == [0, 0, 1, 0, 1, 0, 0]
    for mine, theirs in zip(one["metrics"], two["metrics"], strict=True):
        if mine["trained_tokens"] == theirs["trained_tokens"]:  # one process stops where it meets a NaN
            counts = [{name: found.get(name, 0.0) for name in COUNTS} for found in (mine, theirs)]
            assert counts[1] == pytest.approx(counts[0], rel=5e-3 if is_full else 1e-3)
    for rows in ("before", "old", "now"):
        for mine, theirs in zip(one[rows], two[rows], strict=True):
            assert theirs == pytest.approx(mine, abs=5e-3 if is_full else 1e-3)
    for file in ["merged/model.safetensors"] + ["adapter/adapter_model.safetensors"] * (way == "lora"):
        ours, theirs = (load_file(place / file) for place in (alone, directory / what))
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=2e-4)
    if is_full:  # one process goes on from a checkpoint of two
        learner = trainer(directory, **FULL)
        learner.load(directory / what / "checkpoint")
        learner.step(batch(6))
        torch.testing.assert_close(two["moved"], learner.adapter(), **near)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_is_killed_the_others_end_and_say_why(directory: Path, tmp_path: Path, victim: int) -> None:
    out, process = directory / "waits", worker(tmp_path, directory, "waits")
    for path in (out / "pid-0", out / "pid-1", out / "stepped"):
        while not path.exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
    pids = [int((out / f"pid-{rank}").read_text()) for rank in (0, 1)]
    os.kill(pids[victim], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    for file in out.iterdir():
        file.unlink()
    assert process.returncode != 0
    assert "RankLost: another process of the trainer has ended" in output
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_two_processes_train_from_the_store_and_publish_until_the_launcher_ends(
    base: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async with bench(base, tmp_path) as b:
        rollouts = await b.groups("t1", "t2")
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(b.config.model_dump(mode="json", exclude_unset=True)))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", EXAMPLES / "distributed" / "cpu.yaml"),
            *("-m", "lightning_proxy.cli", "--config", config, "train"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        while not (live := await b.store.versions.live()).verified or live.version < 1:
            assert process.returncode is None, (await process.communicate())[0].decode()
            await asyncio.sleep(0.2)
        trainers = psutil.Process(process.pid).children(recursive=True)
        assert len(trainers) == 2
        process.send_signal(number)
        output = (await process.communicate())[0].decode()
        assert "RankLost" not in output and not psutil.wait_procs(trainers, timeout=10)[1]
        assert output.count("step 1  reward") == 1, "only one of them reports"
        assert await b.steps_of(rollouts) == {1}
        assert live.publish == "merged"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fsdp_version", 1, "fsdp_version must be 2"),
        ("cpu_offload", CPUOffloadPolicy(), "fsdp_offload_params must be false"),
        ("cpu_ram_efficient_loading", True, "fsdp_cpu_ram_efficient_loading must be false"),
        ("activation_checkpointing", True, "fsdp_activation_checkpointing must be false"),
    ],
)
def test_sharding_in_a_way_that_is_not_supported_is_refused(name: str, value: Any, message: str) -> None:
    given = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    check(given)
    setattr(given, name, value)
    with pytest.raises(ConfigError, match=message):
        check(given)


COST = TreeCost(attention=0.001, max_nodes=10_000)


@pytest.mark.parametrize(("ranks", "longest"), [(1, 1.0), (2, 0.65), (8, 0.25)])
def test_shares_hold_every_sample_once_and_wait_for_nobody_long(ranks: int, longest: float) -> None:
    samples = batch(1, tasks=3, siblings=8).samples
    whole = micro_batches(samples, COST)
    shares = share_out(whole, COST, ranks)
    shared = [s for share in shares for part in share for s in part.samples]
    assert len(shares) == ranks and sorted(map(repr, shared)) == sorted(map(repr, samples))
    work = [sum(COST(part.tree) for part in share) for share in shares]
    assert max(work) <= longest * sum(COST(part.tree) for part in whole)  # of what one rank would have to do


def test_a_sample_that_cannot_be_halved_is_left_whole() -> None:
    shares = share_out(micro_batches(batch(1, 1, 1).samples, COST), COST, 3)
    assert [len(share) for share in shares] == [1, 0, 0]
    assert share_out([], COST, 2) == [[], []]
