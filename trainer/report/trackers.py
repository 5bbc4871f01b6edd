"""The trackers of `trainer.report_to`, by transformers' own callbacks; a policy is one run, through every restart."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from ...proxy.errors import ConfigError

RUN_FILE = "run.json"
# Where trackers file the runs, unless their own variables say something else.
PROJECT = "lightning-proxy"
NO_TRACKER = {"all", "none"}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that transformers does not know, or whose package is missing."""
    for name in set(names) - NO_TRACKER:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(
                f"trainer.report_to: unknown tracker {name!r}, known are {', '.join(INTEGRATION_TO_CALLBACK)}"
            )
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"trainer.report_to: {name} cannot be used: {error}") from None


class Run:
    """The run of a directory in its trackers. Its name, and what MLflow calls it, are kept there in a file."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / RUN_FILE
        known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self.name: str = known.get("name") or f"{_word(directory.parent.name)}-{secrets.token_hex(3)}"
        self.mlflow_id: str | None = known.get("mlflow_id")

    def go_on(self, names: Sequence[str]) -> None:
        """Let W&B and MLflow go on with this run, unless their own variables say something else."""
        if "wandb" in names:
            os.environ.setdefault("WANDB_RUN_ID", self.name)
            os.environ.setdefault("WANDB_RESUME", "allow")
            os.environ.setdefault("WANDB_PROJECT", PROJECT)
        if "mlflow" in names:
            os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", PROJECT)
            if self.mlflow_id:
                os.environ.setdefault("MLFLOW_RUN_ID", self.mlflow_id)

    def in_one_place(self, callbacks: CallbackHandler) -> None:
        """TensorBoard begins another directory at each start by default, which it shows as another run."""
        for callback in callbacks.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(self._file.parent / "tensorboard")

    def begun(self) -> None:
        """Keep the run's names for the next start."""
        mlflow = sys.modules.get("mlflow")
        if mlflow is not None and (active := mlflow.active_run()) is not None:
            self.mlflow_id = active.info.run_id
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"name": self.name, "mlflow_id": self.mlflow_id}))


def _word(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name).strip("-")[:40] or "policy"
