"""Fine-tuned weights among RL steps: they are published as a version of their own."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_proxy.core.errors import (
    ConfigError,
    LightningError,
)
from lightning_proxy.features.tune.run import TuningRun
from lightning_proxy.features.tune.sft import SFT
from lightning_proxy.serving.vllm import VllmServer
from support.training import (
    OWN_ADAPTERS,
    bench,
)


@pytest.mark.parametrize("publish", ["merged", "lora"])
async def test_fine_tuned_weights_are_published_and_rl_goes_on_with_the_next_version(
    base: Path, tmp_path: Path, publish: str
) -> None:
    async with bench(base, tmp_path, publish, sft={"learning_rate": 0.01, "epochs": 2}) as b:
        rollouts = await b.groups("t1", "t2")
        await b.loop(partial(TuningRun, SFT)).run(asyncio.Event())
        live = await b.store.versions.live()
        assert (live.version, live.verified, await b.steps_of(rollouts)) == (1, True, {None})
        await b.loop().run(asyncio.Event(), once=True)
        steps = await b.store.steps.all()
        assert [(s.metrics.get("method"), s.base, s.version) for s in steps] == [("sft", 0, 1), (None, 1, 2)]
        assert await b.steps_of(rollouts) == {2}
        assert (await b.store.versions.live()).verified


@pytest.mark.parametrize("moment", ["commit", "publish"])
async def test_a_fine_tuning_run_that_was_killed_is_one_version(
    base: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    def crash(*_: Any, **__: Any) -> Any:
        raise Crash

    async with bench(base, tmp_path, sft={"learning_rate": 0.01, "epochs": 2}) as b:
        await b.groups("t1", "t2")
        run = b.loop(partial(TuningRun, SFT))
        with monkeypatch.context() as broken:
            broken.setattr(*{"commit": (b.store.steps, "trained"), "publish": (VllmServer, "sample")}[moment], crash)
            with pytest.raises(Crash):
                await run.run(asyncio.Event())
        weights = b.trainer.adapter()
        await b.loop(partial(TuningRun, SFT)).run(asyncio.Event())
        assert len(await b.store.steps.all()) == 1
        assert ((await b.store.versions.live()).step, (await b.store.versions.live()).verified) == (1, True)
        for name, weight in b.trainer.adapter().items():
            assert torch.allclose(weight, weights[name], atol=1e-6), name


async def test_adapters_of_agents_are_not_fine_tuned(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, "lora", policy=OWN_ADAPTERS) as b:
        with pytest.raises(ConfigError, match="not for policy.adapters yet"):
            b.loop(partial(TuningRun, SFT))


async def test_nothing_is_fine_tuned_while_publication_is_stopped(base: Path, tmp_path: Path) -> None:
    async with bench(base, tmp_path, collapse={"max_kl": 1e-9, "steps": 1}) as b:
        await b.groups("t1", "t2")
        await b.loop().run(asyncio.Event(), once=True)
        with pytest.raises(LightningError, match="publication is stopped: .* `lightning-proxy policy promote 0`"):
            await b.loop(partial(TuningRun, SFT)).run(asyncio.Event())
        assert len(await b.store.steps.all()) == 1
