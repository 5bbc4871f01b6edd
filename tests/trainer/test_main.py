"""The whole trainer, as `train` runs it, beside a server that is played."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_proxy.trainer.plugins import Run
from lightning_proxy.trainer.train import train
from support.training import bench


async def test_a_trainer_takes_what_is_ready_shows_its_step_and_makes_it_live(base: Path, tmp_path: Path) -> None:
    shown: list[int] = []

    def show(step: int, metrics: Mapping[str, Any]) -> None:
        shown.append(step)

    async with bench(base, tmp_path, "lora") as b:
        await b.groups("t1", "t2")
        await train(b.config, asyncio.Event(), Run(once=True, show=show))
        live = await b.store.versions.live()
        assert (shown, live.version, live.verified) == ([1], 1, True)
