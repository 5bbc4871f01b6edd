"""All weights through the loop: RL, imitation and preferences train and publish them, also offline."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_proxy.core.config.root import Config
from lightning_proxy.features.tune.offline import train_offline
from lightning_proxy.features.tune.preferences import DPO, KTO
from lightning_proxy.features.tune.run import TuningRun
from lightning_proxy.features.tune.sft import SFT
from lightning_proxy.trainer.loop import TrainingLoop
from lightning_proxy.trainer.plugins import Offline, Run
from support.training import bench

RUNS: dict[str, Any] = {
    "rl": TrainingLoop,
    "sft": partial(TuningRun, SFT),
    "dpo": partial(TuningRun, DPO),
    "kto": partial(TuningRun, KTO),
}
RATES: dict[str, Any] = {name: {"learning_rate": 0.005, "epochs": 2, "held_out": 0.0} for name in ("sft", "dpo", "kto")}


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


@pytest.mark.parametrize("method", RUNS)
async def test_what_a_method_makes_of_all_weights_is_published(
    method: str, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(
        base, tmp_path, weights="full", learning_rate=0.005, teacher={"base_url": "http://127.0.0.1:1/v1"}, **RATES
    ) as b:
        await b.groups("t1", "t2")
        once = {"once": True} if method == "rl" else {}
        await b.loop(RUNS[method]).run(asyncio.Event(), **once)
        if method != "rl":
            assert "the learning rate 0.005 is high for trainer.weights: full" in caplog.text
            assert f"teacher is for RL: --method {method} does without it" in caplog.text
        live = await b.store.versions.live()
        assert (live.version, live.publish, live.verified) == (1, "merged", True)
        (step,) = await b.store.steps.all()
        published, before = weights_in(Path(str(live.path))), weights_in(base)
        ours = b.trainer.adapter()
        assert all(torch.equal(weight, ours[name]) for name, weight in published.items())
        assert not any(torch.equal(weight, before[name]) for name, weight in published.items())
        again = b.loop(RUNS["rl"])
        b.trainer.load(Path(str(step.checkpoint)))
        assert again.base == 0 and all(torch.equal(w, ours[name]) for name, w in b.trainer.adapter().items())


@pytest.mark.parametrize("method", ["rl", "dpo"])
async def test_offline_leaves_a_model_and_no_adapter(
    method: str, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with bench(base, tmp_path) as b:
        await b.groups("t1", "t2")
    config = Config.model_validate({
        "policy": {"model": str(base), "directory": tmp_path / "policy"},
        "trainer": {
            "weights": "full", "group_size": 4, "tasks_per_step": 2, "learning_rate": 0.005, "report_to": [],
            "dtype": "float32",
        },
        "tune": RATES,
    })  # fmt: skip
    out = tmp_path / "out"
    await train_offline(config, Run(method), Offline(tmp_path / "store.db", out), asyncio.Event())
    assert not (out / "adapter").exists()
    before = weights_in(base)
    assert not any(torch.equal(weight, before[name]) for name, weight in weights_in(out / "model").items())
    assert f"to serve them: vllm serve {out / 'model'} --served-model-name policy" in caplog.text
    assert "adapter" not in caplog.text
