"""A step on a real server with the Tinker API is compared with the local trainer's, on the demo's model.

The file is also the program that does so: the server's client is of another version than the product's environment has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.system import free_port, wait_until
from lightning_proxy.commands.demo.model import cache_directory, prepare_model
from lightning_proxy.features.tinker.tinker_trainer import TinkerTrainer
from lightning_proxy.trainer.step.trainer import LightningTrainer
from lightning_proxy.trainer.types import Batch, Sample
from support.paths import ROOT, TESTS
from support.sections import PolicyConfig, TrainerConfig
from support.twice import get

# The server's ppo is clipped at 0.8 and 1.2, without a second bound, and its gradients are not clipped.
COMMON: dict[str, Any] = {
    "lora_rank": 8, "report_to": [], "learning_rate": 1e-3, "max_sample_tokens": 256, "dtype": "float32",
    "loss_type": "grpo", "clip_low": 0.2, "clip_high": 0.2, "importance_cap": 100.0, "max_grad_norm": 1e9,
}  # fmt: skip
PROMPT, LENGTHS, ADVANTAGES = 10, (24, 28, 20, 31), (-0.7, 1.0, -0.7, 1.0)


def compare(model: Path, directory: Path, url: str) -> dict[str, Any]:
    policy = PolicyConfig.model_validate({"model": str(model), "directory": str(directory)})
    there = {"backend": True, "tinker": {"base_url": url, "reduction": "mean"}}
    service = TinkerTrainer(TrainerConfig.model_validate(COMMON | there), policy)
    local = LightningTrainer(TrainerConfig.model_validate(COMMON), policy)
    service.save_weights(directory / "v0", merged=False)
    start = {name: weight.float() for name, weight in service.adapter().items()}
    local.weight_sets.set({"default": start})
    torch.manual_seed(0)
    rows = [tuple(torch.randint(3, 40_000, (length,)).tolist()) for length in LENGTHS]
    ours, theirs = local.logprobs(rows), service.logprobs(rows)
    batch = batch_of(rows, ours)
    told = {"service": service.step(batch), "local": local.step(batch)}
    service.save_weights(directory / "v1", merged=False)
    after, moved = service.logprobs(rows), local.logprobs(rows)
    service.save(directory / "1")
    service.load(directory / "1")
    resumed = service.logprobs(rows)
    service.close()
    found = {"after": apart(after, moved), "moved": apart(after, theirs), "resumed": apart(after, resumed)}
    found |= {"logprobs": apart(ours, theirs), **update(start, service.adapter(), local.adapter())}
    return found | {"loss": [told["local"]["loss"], told["service"]["loss"]]}


def batch_of(rows: list[tuple[int, ...]], logprobs: list[list[float]]) -> Batch:
    samples = []
    for i, (ids, scores) in enumerate(zip(rows, logprobs, strict=True)):
        mask = tuple(int(place >= PROMPT) for place in range(len(ids)))
        advantages = tuple(ADVANTAGES[i] * sampled for sampled in mask)
        sampled = tuple(score * m for score, m in zip(scores, mask, strict=True))
        samples.append(Sample(f"r{i}", "t", ids, mask, sampled, advantages, (1.0,) * len(ids)))
    return Batch(1, tuple(samples), tuple(s.rollout_id for s in samples), compared=len(samples))


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(x - y) for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True))


def update(start: Any, there: Any, here: Any) -> dict[str, float]:
    """How the two adapters moved: the cosine of the angle between the updates, and their difference by element."""
    theirs, ours = (
        torch.cat([(weights[name].cpu().double() - start[name].double()).flatten() for name in start])
        for weights in (there, here)
    )
    away = (theirs - ours).abs()
    cosine = torch.nn.functional.cosine_similarity(theirs, ours, 0)
    return {"cosine": float(cosine), "greatest": float(away.max()), "mean": float(away.mean())}


ENVIRONMENT = ROOT / ".venv-tinker"
CLIENT = ENVIRONMENT / "client"  # of the server's time
INSTALLED = ENVIRONMENT / ".set-up"
PYTHON = ENVIRONMENT / "bin/python"
# The server starts its engine by `uv run EXTRAS -m ENGINE`, which would make another environment.
UV = f"""#!/bin/sh
while [ "$1" != "-m" ]; do shift; done
exec {PYTHON} "$@"
"""
ENGINE = {"max_lora_adapters": 4, "max_lora_rank": 8, "train_micro_batch_size": 4}


def as_it_reads(model: Path, directory: Path) -> Path:
    """Copy a model so that transformers 4, which the server has, reads it as transformers 5 does."""
    shutil.copytree(model, directory)
    config, tokenizer = (directory / name for name in ("config.json", "tokenizer_config.json"))
    read = json.loads(config.read_text())
    config.write_text(json.dumps(read | {"rope_theta": read["rope_parameters"]["rope_theta"]}))
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


@contextmanager
def tinker_server(model: Path, directory: Path) -> Iterator[str]:
    """Yields its URL."""
    port, shim = free_port(), directory / "bin/uv"
    shim.parent.mkdir()
    shim.write_text(UV)
    shim.chmod(0o755)
    environment = os.environ | {"PATH": f"{shim.parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    options = {
        "host": "127.0.0.1", "port": str(port), "base-model": str(as_it_reads(model, directory / "model")),
        "backend-config": json.dumps(ENGINE), "checkpoints-base": str(directory / "checkpoints"),
        "database-url": f"sqlite:///{directory / 'tinker.db'}",
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [PYTHON, "-m", "tx.tinker.api", *arguments], stdout=log, stderr=log, cwd=directory, env=environment
        )
    try:
        wait_until(lambda: server.poll() is not None or get(f"http://127.0.0.1:{port}/"), 300, "the server is there")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


pytestmark = pytest.mark.skipif(not INSTALLED.exists(), reason="there is no Tinker server here: make tinker")


@pytest.mark.timeout(1800)  # the server compiles every shape again
def test_a_step_on_a_tinker_server_is_the_local_trainers_step(tmp_path: Path) -> None:
    model = prepare_model(cache_directory())
    with tinker_server(model, tmp_path) as url, (tmp_path / "compared.log").open("wb") as log:
        program = [sys.executable, "-W", "ignore", __file__]
        environment = os.environ | {"PYTHONPATH": f"{CLIENT}:{TESTS}"}
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


if __name__ == "__main__":
    found = compare(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    Path(sys.argv[2], "found.json").write_text(json.dumps(found))
