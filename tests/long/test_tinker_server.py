"""A step on a real server with the Tinker API beside the local trainer's, on the demo's model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from support.paths import TESTS
from support.tinker_server import CLIENT, INSTALLED, tinker_server

pytestmark = pytest.mark.skipif(not INSTALLED.exists(), reason="there is no Tinker server here: make tinker")


@pytest.mark.timeout(1800)  # the server compiles every shape anew
def test_a_step_on_a_tinker_server_is_the_local_trainers_step(tmp_path: Path) -> None:
    model = prepare_model(cache_directory())
    with tinker_server(model, tmp_path) as url, (tmp_path / "compared.log").open("wb") as log:
        program = [sys.executable, "-W", "ignore", str(TESTS / "support/compare_backends.py")]
        environment = os.environ | {"PYTHONPATH": str(CLIENT)}
        subprocess.run([*program, str(model), str(tmp_path), url], env=environment, check=True, stdout=log, stderr=log)
    found = json.loads((tmp_path / "found.json").read_text())
    print(found)
    assert found["logprobs"] < 1e-3
    assert found["loss"][1] == pytest.approx(found["loss"][0], rel=1e-3)
    # Adam's first step has the rate's size wherever there is a gradient, so rounding turns a few elements round.
    assert found["cosine"] > 0.999
    assert found["mean"] < 1e-6
    assert found["after"] < 0.01 < found["moved"]
    assert found["resumed"] < 1e-6
