"""Reports steps to the trackers of `trainer.report_to`, by transformers' own callbacks.

A policy is one run in its trackers, through every restart.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from .metric_schema import by_tag

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
# Trackers file runs under this name, unless their own variables say something else.
PROJECT = "lightning-proxy"


class Trackers:
    """The trackers of a trainer. The run's name, and MLflow's id of it, are kept in a file of the directory.

    `args`, `state` and `model` are what transformers' Trainer would show them: the learning rate, the last step.
    """

    def __init__(self, config: TrainerConfig, directory: Path) -> None:
        """Let W&B and MLflow continue the run of this directory, unless their own variables say otherwise.

        Raises ConfigError for a tracker that transformers does not know, or whose package is missing.
        """
        self._file = directory / RUN_FILE
        self._known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        policy = re.sub(r"[^\w-]+", "-", directory.parent.name).strip("-")[:40] or "policy"
        self.run_name: str = self._known.get("name") or f"{policy}-{secrets.token_hex(3)}"
        self._begun = False
        variables: dict[str, str | None] = {}
        if "wandb" in config.report_to:
            variables |= {"WANDB_RUN_ID": self.run_name, "WANDB_RESUME": "allow", "WANDB_PROJECT": PROJECT}
        if "mlflow" in config.report_to:
            variables |= {"MLFLOW_EXPERIMENT_NAME": PROJECT, "MLFLOW_RUN_ID": self._known.get("mlflow_id")}
        for name, value in variables.items():
            if value:
                os.environ.setdefault(name, value)
        self.args = TrainingArguments(
            output_dir=str(directory),
            use_cpu=not torch.cuda.is_available(),
            lr_scheduler_type=config.lr_scheduler,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
            max_steps=config.max_steps or -1,
            seed=config.seed,
            report_to=config.report_to or "none",
            run_name=self.run_name,
            project=PROJECT,
        )
        self.state = TrainerState()
        self.model: Any = None
        self.callbacks = [_callback(name) for name in self.args.report_to]
        for callback in self.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(directory / "tensorboard")  # one over all starts

    def begin(self) -> None:
        """Begin or continue the run, and keep its names for the next start. ConfigError if a tracker cannot."""
        if self._begun:
            return
        names = self.args.report_to
        try:
            self._tell("on_train_begin")
        except Exception as error:  # whatever a tracker raises without its key, its server, its disk
            raise ConfigError(f"trainer.report_to: {', '.join(names)}: {_one_line(error)}") from error
        self._begun = True
        if names:
            mlflow = sys.modules.get("mlflow")
            run = None if mlflow is None else mlflow.active_run()
            mlflow_id = self._known.get("mlflow_id") if run is None else run.info.run_id
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps({"name": self.run_name, "mlflow_id": mlflow_id}))

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Send the last step's numbers, by the tags of `metric_schema`. A failure is only logged."""
        self.begin()
        try:
            self._tell("on_log", logs=by_tag(metrics))
        except Exception as error:
            log.warning("step %d did not reach every tracker: %s", self.state.global_step, _one_line(error))

    def close(self) -> None:
        """Let the trackers finish their files."""
        if self._begun:
            self._tell("on_train_end")
            self._begun = False

    def _tell(self, event: str, **about: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, TrainerControl(), model=self.model, **about)


def _callback(name: str) -> TrainerCallback:
    if name not in INTEGRATION_TO_CALLBACK:
        raise ConfigError(
            f"trainer.report_to: unknown tracker {name!r}, known are {', '.join(INTEGRATION_TO_CALLBACK)}"
        )
    try:
        callback: TrainerCallback = INTEGRATION_TO_CALLBACK[name]()
    except (RuntimeError, ImportError) as error:
        raise ConfigError(f"trainer.report_to: {name} cannot be used: {error}") from None
    return callback


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())
