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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ...core.errors import ConfigError
from .metric_schema import by_tag

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
# Trackers file runs under this name, unless their own variables say something else.
PROJECT = "lightning-proxy"
NO_TRACKER = {"all", "none"}


class Trackers:
    """The trackers of a trainer. The run's name, and MLflow's id of it, are kept in a file of the directory."""

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        """Raises ConfigError for a tracker that transformers does not know, or whose package is missing."""
        _check(names)
        self._names = names
        self._file = directory / RUN_FILE
        known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self.run_name: str = known.get("name") or f"{_policy_name(directory)}-{secrets.token_hex(3)}"
        self._mlflow_id: str | None = known.get("mlflow_id")
        self._begun = False
        self._go_on()

    def _go_on(self) -> None:
        """Let W&B and MLflow continue this run, unless their own variables say otherwise."""
        if "wandb" in self._names:
            os.environ.setdefault("WANDB_RUN_ID", self.run_name)
            os.environ.setdefault("WANDB_RESUME", "allow")
            os.environ.setdefault("WANDB_PROJECT", PROJECT)
        if "mlflow" in self._names:
            os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", PROJECT)
            if self._mlflow_id:
                os.environ.setdefault("MLFLOW_RUN_ID", self._mlflow_id)

    def attach(self, trainer: Any) -> None:
        """Report for this trainer, through its callbacks. TensorBoard keeps one directory over all starts."""
        self._trainer = trainer
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(self._file.parent / "tensorboard")

    def begin(self) -> None:
        """Begin or continue the run. Raises ConfigError if a tracker cannot."""
        if self._begun:
            return
        trainer = self._trainer
        try:
            trainer.control = trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        except Exception as error:  # whatever a tracker raises without its key, its server, its disk
            raise ConfigError(f"trainer.report_to: {', '.join(trainer.args.report_to)}: {_one_line(error)}") from error
        self._begun = True
        if trainer.args.report_to:
            self._keep_names()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Send the last step's numbers, by the tags of `metric_schema`. A failure is only logged."""
        self.begin()
        trainer = self._trainer
        try:
            trainer.control = trainer.callback_handler.on_log(
                trainer.args, trainer.state, trainer.control, by_tag(metrics)
            )
        except Exception as error:
            log.warning("step %d did not reach every tracker: %s", trainer.state.global_step, _one_line(error))

    def close(self) -> None:
        """Let the trackers finish their files."""
        if self._begun:
            trainer = self._trainer
            trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            self._begun = False

    def _keep_names(self) -> None:
        """Keep the run's names for the next start."""
        mlflow = sys.modules.get("mlflow")
        if mlflow is not None and (active := mlflow.active_run()) is not None:
            self._mlflow_id = active.info.run_id
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"name": self.run_name, "mlflow_id": self._mlflow_id}))


def _check(names: Sequence[str]) -> None:
    for name in set(names) - NO_TRACKER:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(
                f"trainer.report_to: unknown tracker {name!r}, known are {', '.join(INTEGRATION_TO_CALLBACK)}"
            )
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"trainer.report_to: {name} cannot be used: {error}") from None


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())


def _policy_name(directory: Path) -> str:
    return re.sub(r"[^\w-]+", "-", directory.parent.name).strip("-")[:40] or "policy"
