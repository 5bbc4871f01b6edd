"""Lets the trackers of `trainer.report_to` report the steps of a trainer that is no Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, get_scheduler
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from ...core.config.trainer import TrainerConfig
from ...trainer.report.trackers import Trackers
from ...trainer.step.trl_config import ENDLESS, grpo_config


class Reporter:
    """What `Trackers` uses of a Trainer: callbacks, arguments and state."""

    def __init__(self, config: TrainerConfig, rate: float, trackers: Trackers, directory: Path) -> None:
        self.args = grpo_config(config, rate, directory, trackers.run_name)
        callbacks = get_reporting_integration_callbacks(self.args.report_to)
        self.callback_handler = CallbackHandler([DefaultFlowCallback, *callbacks], None, None, None, None)
        self.state, self.control = TrainerState(), TrainerControl()
        trackers.attach(self)


def rate_after(config: TrainerConfig, rate: float, updates: int) -> float:
    """Return the learning rate of the next update, after so many, by `trainer.lr_scheduler`; `rate` is its greatest."""
    nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    steps = config.max_steps or ENDLESS
    schedule: Any = get_scheduler(config.lr_scheduler, nothing, config.warmup_steps, steps)
    return float(rate * schedule.lr_lambdas[0](updates))
