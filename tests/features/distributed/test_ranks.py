"""The trainer on two real processes: the same update as one, also where they have unequal work, and no silent end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from support.ranks import FULL, OWN, batch, lead, make_model, trainer

torch = pytest.importorskip("torch")

from accelerate import FullyShardedDataParallelPlugin  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from lightning_proxy.core.errors import ConfigError  # noqa: E402
from lightning_proxy.features.distributed.ranks import check, share_out  # noqa: E402
from lightning_proxy.trainer.rows.prefix_tree import TreeCost, micro_batches  # noqa: E402
from support.paths import ROOT  # noqa: E402

COUNTS = ("skipped", "trained_tokens", "ratio_mean", "ratio_max", "clip_share", "entropy", "loss", "grad_norm", "lr")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and in `one/` what a single process makes of it."""
    directory = tmp_path_factory.mktemp("ranks")
    make_model(directory / "model")
    (directory / "one").mkdir()
    torch.save(lead(trainer(directory), directory / "one"), directory / "one" / "rank-0.pt")
    return directory


def launcher(tmp_path: Path, kind: str) -> Path:
    """Two processes on the CPU as `examples/distributed` starts them; `fsdp`: with the base sharded as there."""
    config = yaml.safe_load((ROOT / "examples/distributed/cpu.yaml").read_text())
    if kind == "fsdp":
        sharded = yaml.safe_load((ROOT / "examples/distributed/fsdp2.yaml").read_text())
        config |= {key: sharded[key] for key in ("distributed_type", "fsdp_config")}
    path = tmp_path / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launch(config: Path, *program: str) -> "subprocess.Popen[str]":
    paths = {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *program],
        env={**os.environ, **paths}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def worker(config: Path, what: str, directory: Path) -> "subprocess.Popen[str]":
    return launch(config, str(ROOT / "tests/support/ranks.py"), what, str(directory))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_two_processes_make_the_update_of_one(directory: Path, tmp_path: Path, kind: str) -> None:
    """Seven steps: unequal shares, a NaN that one rank meets, a single sample, none at all, before and after a load."""
    process = worker(launcher(tmp_path, kind), kind, directory)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    one, two, other = (torch.load(directory / f) for f in ("one/rank-0.pt", f"{kind}/rank-0.pt", f"{kind}/rank-1.pt"))
    for adapter in ("kept", "moved", "again"):
        for name, weight in one[adapter].items():
            torch.testing.assert_close(two[adapter][name], weight, rtol=1e-4, atol=2e-5)
    assert all(torch.equal(weight, other["adapter"][name]) for name, weight in two["again"].items())
    assert other["rank"] == 1 and other["sharded"] == (kind == "fsdp")
    assert (other["recomputed"] > 0) == (kind == "fsdp"), "with a sharded base, layers are checkpointed"
    assert [m["skipped"] for m in two["metrics"]] == [0, 0, 1, 0, 1, 0, 0]
    for alone, together in zip(one["metrics"], two["metrics"], strict=True):
        if alone["trained_tokens"] == together["trained_tokens"]:  # one process stops where it meets a NaN
            assert {k: together.get(k, 0.0) for k in COUNTS} == pytest.approx(
                {k: alone.get(k, 0.0) for k in COUNTS}, rel=1e-3
            )
    for rows in ("before", "old", "now"):
        for mine, theirs in zip(one[rows], two[rows], strict=True):
            assert theirs == pytest.approx(mine, abs=1e-3)
    for file in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = (load_file(directory / who / file) for who in ("one", kind))
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_two_processes_train_all_weights_as_one_does(directory: Path, tmp_path: Path, kind: str) -> None:
    """The same steps, with a KL to the base model. A checkpoint of two processes is gone on with by one."""
    (directory / f"full-{kind}-one").mkdir()
    one = lead(trainer(directory, **FULL), directory / f"full-{kind}-one")
    process = worker(launcher(tmp_path, kind), f"full-{kind}", directory)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    two, other = (torch.load(directory / f"full-{kind}" / f"rank-{rank}.pt") for rank in (0, 1))
    assert other["sharded"] == (kind == "fsdp") and (other["recomputed"] > 0) == (kind == "fsdp")
    for weights in ("kept", "moved", "again"):
        assert one[weights].keys() == two[weights].keys()
        for name, weight in one[weights].items():
            torch.testing.assert_close(two[weights][name], weight, rtol=1e-3, atol=2e-4)
    for alone, together in zip(one["metrics"], two["metrics"], strict=True):
        assert together["skipped"] == alone["skipped"]
        if alone["trained_tokens"] == together["trained_tokens"]:  # one process stops where it meets a NaN
            for name in ("grad_norm", "kl_base"):
                assert together.get(name, 0.0) == pytest.approx(alone.get(name, 0.0), rel=5e-3, abs=1e-6)
    for rows in ("before", "old", "now"):
        for mine, theirs in zip(one[rows], two[rows], strict=True):
            assert theirs == pytest.approx(mine, abs=5e-3)
    ours, theirs = (
        load_file(directory / who / "merged/model.safetensors") for who in (f"full-{kind}-one", f"full-{kind}")
    )
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=2e-4)
    alone = trainer(directory, **FULL)
    alone.load(directory / f"full-{kind}" / "checkpoint")
    alone.step(batch(6))
    for name, weight in alone.adapter().items():
        torch.testing.assert_close(two["moved"][name], weight, rtol=1e-3, atol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_two_processes_move_each_of_several_adapters_as_one_does(directory: Path, tmp_path: Path, kind: str) -> None:
    what = f"adapters-{kind}"
    (directory / f"{what}-one").mkdir()
    one = lead(trainer(directory, OWN), directory / f"{what}-one")
    process = worker(launcher(tmp_path, kind), what, directory)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    two, other = (torch.load(directory / what / f"rank-{rank}.pt") for rank in (0, 1))
    for adapter in ("default", *OWN):
        for name, weight in one["all"][adapter].items():
            torch.testing.assert_close(two["all"][adapter][name], weight, rtol=1e-4, atol=2e-5)
            assert torch.equal(two["all"][adapter][name], other["all"][adapter][name])
    for alone, together in zip(one["metrics"], two["metrics"], strict=True):
        assert together["skipped"] == alone["skipped"]
        assert together.get("grad_norm", 0.0) == pytest.approx(alone.get("grad_norm", 0.0), rel=1e-3)
    for mine, theirs in zip(one["now"], two["now"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_is_killed_the_others_end_and_say_why(directory: Path, tmp_path: Path, victim: int) -> None:
    out = directory / "waits"
    process = worker(launcher(tmp_path, "plain"), "waits", directory)
    for rank in (0, 1):
        wait_for(out / f"pid-{rank}", process)
    wait_for(out / "stepped", process)
    pids = [int((out / f"pid-{rank}").read_text()) for rank in (0, 1)]
    os.kill(pids[victim], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    for file in out.iterdir():
        file.unlink()
    assert process.returncode != 0
    assert "RankLost: another process of the trainer has ended" in output
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FSDP_VERSION", "1", "fsdp_version: only 2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params: must be false"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "fsdp_cpu_ram_efficient_loading: must be false"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "fsdp_activation_checkpointing: must be false"),
    ],
)
def test_sharding_in_a_way_that_is_not_supported_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    supported = {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    for name, setting in supported.items():
        monkeypatch.setenv(name, setting)
    check(FullyShardedDataParallelPlugin())
    monkeypatch.setenv(variable, value)
    if variable == "FSDP_VERSION":
        monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD")
    with pytest.raises(ConfigError, match=message):
        check(FullyShardedDataParallelPlugin())


@pytest.mark.parametrize(("ranks", "longest"), [(1, 1.0), (2, 0.65), (3, 0.5), (8, 0.25)])
def test_shares_hold_every_sample_once_and_wait_for_nobody_long(ranks: int, longest: float) -> None:
    cost = TreeCost(attention=0.001, max_nodes=10_000)
    samples = batch(1, tasks=3, siblings=8).samples
    whole = micro_batches(samples, cost)
    shares = share_out(whole, cost, ranks)
    shared = [s for share in shares for part in share for s in part.samples]
    assert len(shares) == ranks and sorted(map(repr, shared)) == sorted(map(repr, samples))
    work = [sum(cost(part.tree) for part in share) for share in shares]
    assert max(work) <= longest * sum(cost(part.tree) for part in whole)  # of what one rank would have to do
    if ranks == 1:
        assert shares == [whole]


def test_a_sample_that_cannot_be_halved_is_left_whole() -> None:
    cost = TreeCost(attention=0.001, max_nodes=10_000)
    shares = share_out(micro_batches(batch(1, 1, 1).samples, cost), cost, 3)
    assert [len(share) for share in shares] == [1, 0, 0]
    assert share_out([], cost, 2) == [[], []]
