"""`train`: the trainer as a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

from lightning_proxy.commands.vllm import require_model
from lightning_proxy.proxy.config import Config
from lightning_proxy.proxy.errors import LightningError

LAUNCHER_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Offline:
    """Train on `data` (None: the configured store) in `directory` (None: beside the policy's), so many times over."""

    data: Path | None = None
    directory: Path | None = None
    epochs: int = 1


def train(config: Config, *, once: bool = False, offline: Offline | None = None) -> None:
    """Train until SIGINT or SIGTERM (it finishes the step under way) or `max_steps`; with `once`, on what is ready."""
    require_model(config)
    if importlib.util.find_spec("trl") is None:
        raise LightningError("the trainer is not installed: pip install 'lightning-proxy[train]'")
    # torch's threads spin at barriers by default, which starves vLLM's on the same cores; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Of no use to whoever watches: TRL names the releases that its own vLLM client knows, which is not used here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from transformers.utils.logging import disable_progress_bar

    from lightning_proxy.trainer.loop import follow
    from lightning_proxy.trainer.ranks import leads

    disable_progress_bar()  # of every file that is written, between the lines of the steps
    if leads():
        asyncio.run(_train(config, once, offline))
    else:
        follow(config)


async def _train(config: Config, once: bool, offline: Offline | None) -> None:
    from rich.console import Console

    from lightning_proxy.commands.steps import teller
    from lightning_proxy.trainer.loop import train as run
    from lightning_proxy.trainer.offline import train_offline

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    watch = asyncio.create_task(_stop_without_launcher(stop)) if "RANK" in os.environ else None
    if offline is None:
        await run(config, stop, once=once, show=teller(Console(stderr=True, highlight=False)))
    else:
        await train_offline(config, stop, offline.data, offline.directory, offline.epochs)
    if watch is not None:
        watch.cancel()


async def _stop_without_launcher(stop: asyncio.Event) -> None:
    """The launcher of several trainer processes passes signals on; when it is killed there is nobody who would."""
    launcher = os.getppid()
    while os.getppid() == launcher:  # noqa: ASYNC110 - of a parent nothing but this is told
        await asyncio.sleep(LAUNCHER_POLL_S)
    stop.set()
