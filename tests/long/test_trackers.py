"""The trackers of `trainer.report_to`, each at a released version in an environment of its own, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from support.clients import command_for
from support.paths import TESTS
from support.tracked import FOUND

pytest.importorskip("torch")

# The product and what it needs come first, and from the tracker's environment what they lack.
PATHS = [sysconfig.get_path("purelib"), str(Path(sys.prefix) / "typing"), str(TESTS)]

pytestmark = pytest.mark.timeout(900)  # on a machine that has to bring the packages first


@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb"])
def test_a_policy_is_one_run_through_a_restart(tracker: str, tmp_path: Path) -> None:
    def run(*steps: int) -> Any:
        environment = {
            "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline",
            "WANDB_DIR": str(tmp_path), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
            "TRACKIO_DIR": str(tmp_path / "trackio"),
        }  # fmt: skip
        done = subprocess.run(
            [*command, str(tmp_path), *map(str, steps)],
            env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / FOUND).read_text())

    command = command_for(TESTS / "trackers" / f"with_{tracker}.py")
    reported = run(1, 2) + run(3)
    (kept,) = run().values()
    assert [step for step, _ in kept] == [1, 2, 3]
    assert [loss for _, loss in kept] == pytest.approx([loss for _, loss in reported])
