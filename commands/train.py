"""`train`: the trainer as a process of its own."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.config.root import Config
from ..core.errors import LightningError
from ..proxy.dialects.as_chat.recorded import as_chat
from ..serving.mode import check_base_model, has_gpu
from ..trainer.plan import make_plan
from ..trainer.plugins import Run, check
from .put_back import put_back_left
from .vllm import require_model, visible_gpus

LAUNCHER_POLL_S = 1.0
M_ARENA_MAX = -8  # of malloc.h


def train(config: Config, run: Run) -> None:
    """Train until a signal (SIGINT, SIGTERM) or until `max_steps`. With `once`, train only on what is ready.

    A signal ends reinforcement learning after the current step. It interrupts other methods, and the next start
    resumes them.
    """
    run = replace(run, launched=_has_launcher())
    config = prepared(config, run)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    quiet()
    from ..trainer.train import follow

    if os.environ.get("RANK", "0") == "0":
        asyncio.run(_train(config, run))
    else:
        follow(config)


def prepared(config: Config, run: Run) -> Config:
    """Check that the run is possible and prepare the process for torch. Return the plan's configuration."""
    require_model(config)
    if run.offline is None:
        check_base_model(config)
    check(config, run)
    if importlib.util.find_spec("trl") is None:
        raise LightningError("the trainer is not installed: pip install 'lightning-proxy[train]'")
    # A launcher's processes have GPUs of their own (docs/gpu.md).
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    plan = make_plan(config, offline=run.offline is not None or run.launched, sharded=sharded)
    if has_gpu():
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no pieces that nothing fits in
        if not _has_launcher():  # its processes share the GPUs out by themselves
            os.environ.update(visible_gpus(plan.trainer_devices[:1]))
    # torch's threads spin at barriers by default, which starves vLLM's on the same cores; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    one_heap()
    return plan.config


def one_heap() -> None:
    """Make all threads allocate from one heap. By default, glibc gives autograd's thread a second one.

    Each heap keeps the memory of a pass: passes of 2,048 tokens took 11 GiB with two heaps and take 6 with one.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def quiet() -> None:
    """Keep libraries from drawing progress bars between the step lines."""
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of every file that is written
    disable_progress_bars()


def _has_launcher() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


async def _train(config: Config, run: Run) -> None:
    from rich.console import Console

    from ..trainer import train as main
    from .export.policy import where
    from .system.steps import step_printer

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    watch = asyncio.create_task(_stop_without_launcher(stop)) if "RANK" in os.environ else None
    console = Console(stderr=True, highlight=False)
    print_step, taken = step_printer(console), list[int]()

    def show(step: int, metrics: Mapping[str, Any]) -> None:
        taken.append(step)
        print_step(step, metrics)

    if run.offline is None:
        await put_back_left(config, partial(console.print, markup=False))
    await main.train(config, stop, replace(run, show=show), as_chat)
    if run.offline is None:
        if run.once and not taken and not stop.is_set():
            console.print("no step was taken: `lightning-proxy status` says what waits, and what was dropped and why")
        if (place := await where(config)) is not None:
            console.print(place, markup=False, soft_wrap=True)
    if watch is not None:
        watch.cancel()


async def _stop_without_launcher(stop: asyncio.Event) -> None:
    """Set `stop` when the launcher has ended: a killed launcher cannot pass the signal on to its processes."""
    launcher = os.getppid()
    while os.getppid() == launcher:  # noqa: ASYNC110 - nothing notifies of a parent's end
        await asyncio.sleep(LAUNCHER_POLL_S)
    stop.set()
