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
        """Let W&B and MLflow continue the run of this directory, unless their own variables say otherwise.

        Raises ConfigError for a tracker that transformers does not know, or whose package is missing.
        """
        _check(names)
        self._file = directory / RUN_FILE
        self._known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        policy = re.sub(r"[^\w-]+", "-", directory.parent.name).strip("-")[:40] or "policy"
        self.run_name: str = self._known.get("name") or f"{policy}-{secrets.token_hex(3)}"
        self._begun = False
        variables: dict[str, str | None] = {}
        if "wandb" in names:
            variables |= {"WANDB_RUN_ID": self.run_name, "WANDB_RESUME": "allow", "WANDB_PROJECT": PROJECT}
        if "mlflow" in names:
            variables |= {"MLFLOW_EXPERIMENT_NAME": PROJECT, "MLFLOW_RUN_ID": self._known.get("mlflow_id")}
        for name, value in variables.items():
            if value:
                os.environ.setdefault(name, value)

    def attach(self, trainer: Any) -> None:
        """Report for this trainer, through its callbacks. TensorBoard keeps one directory over all starts."""
        self._trainer = trainer
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(self._file.parent / "tensorboard")

    def begin(self) -> None:
        """Begin or continue the run, and keep its names for the next start. ConfigError if a tracker cannot."""
        if self._begun:
            return
        names = self._trainer.args.report_to
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
            self._tell("on_log", by_tag(metrics))
        except Exception as error:
            step = self._trainer.state.global_step
            log.warning("step %d did not reach every tracker: %s", step, _one_line(error))

    def close(self) -> None:
        """Let the trackers finish their files."""
        if self._begun:
            self._tell("on_train_end")
            self._begun = False

    def _tell(self, event: str, *about: Any) -> None:
        trainer = self._trainer
        tell = getattr(trainer.callback_handler, event)
        trainer.control = tell(trainer.args, trainer.state, trainer.control, *about)


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
