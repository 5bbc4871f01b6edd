"""The same recorded rollouts in SQLite and in PostgreSQL, by one process and by two: the same rows and update."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command_line import lightning
from support.paths import ROOT
from support.postgres import postgres_server

torch = pytest.importorskip("torch")

from support.ranks import make_model, trainer  # noqa: E402
from support.step_of_store import SIBLINGS, TASKS, collect, record, step  # noqa: E402

STORES = ("sqlite", "postgres")
MEASURED = ("loss", "grad_norm", "ratio_mean", "entropy", "trained_tokens", "clip_share")


def in_two_processes(directory: Path, url: str, out: Path) -> None:
    config = ROOT / "examples/distributed/cpu.yaml"
    program = [str(ROOT / "tests/support/step_of_store.py"), str(directory), url, str(out)]
    paths = {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *program],
        env={**os.environ, **paths}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], Any]]:
    """By store and number of processes, the step on the rollouts that both stores hold. A claim needs a store anew."""
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
