"""`lightning-proxy`, killed with SIGKILL at a moment that the environment names: KILL_AT=save:3 is the third save.

save: in the middle of writing a checkpoint; step: before a step's gradients are applied; commit: when the checkpoint
is whole and the store does not know of it yet; epoch: when a pass over the data is over and nothing says so yet.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import torch

from lightning_proxy.cli import app
from lightning_proxy.store.training import TrainingSteps
from lightning_proxy.trainer.step.trainer import LightningTrainer

moment, _, at = os.environ["KILL_AT"].partition(":")


def before(kind: Any, name: str) -> None:
    whole, calls = getattr(kind, name), itertools.count(1)

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == int(at):
            if moment == "save":
                Path(args[1]).write_bytes(b"half of a checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)

    setattr(kind, name, killed)


target = {
    "save": (torch, "save"),
    "step": (LightningTrainer, "optim_step"),
    "commit": (TrainingSteps, "trained"),
    "epoch": (TrainingSteps, "end_epoch"),
}
before(*target[moment])
app()
