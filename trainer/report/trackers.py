"""Reports steps to the trackers in `trainer.report_to`, through accelerate.

Across restarts, a policy remains one run in MLflow, TensorBoard, Trackio and Weights & Biases.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from ...core.config.trainer import TrainerConfig
from ...core.errors import ConfigError
from .metric_schema import by_tag

log = logging.getLogger(__name__)

PROJECT = "lightning-proxy"  # trackers file runs under this name


class Trackers:
    """The trackers of a trainer. The file `run.json` keeps the run's name and its MLflow id.

    `step` is the number of the last step. `report` sends metrics under this number.
    """

    def __init__(self, config: TrainerConfig, directory: Path) -> None:
        """Raise ConfigError for a tracker that accelerate does not support or that is not installed."""
        self.step, self._begun = 0, False
        self._file = directory / "run.json"
        self._run = json.loads(self._file.read_text()) if self._file.is_file() else {}
        policy = re.sub(r"[^\w-]+", "-", directory.parent.name).strip("-")[:40] or "policy"
        name = self._run.setdefault("name", f"{policy}-{secrets.token_hex(3)}")
        about = {"name": name, "resume": "allow", "config": config.model_dump(mode="json")}
        options: dict[str, dict[str, Any]] = {
            "mlflow": {"run_name": name, "run_id": self._run.get("mlflow_id")},
            "wandb": about | {"id": name},
            "trackio": about,
        }
        projects = {"tensorboard": "tensorboard", "wandb": os.environ.get("WANDB_PROJECT", PROJECT)}
        self.trackers: list[GeneralTracker] = []
        for kind in config.report_to:
            if (made := LOGGER_TYPE_TO_CLASS.get(kind)) is None:
                known = ", ".join(map(str, LOGGER_TYPE_TO_CLASS))
                raise ConfigError(f"trainer.report_to: unknown tracker {kind!r}; choose from {known}")
            if kind not in map(str, get_available_trackers()):
                raise ConfigError(f"trainer.report_to: {kind} is not installed: pip install {kind}")
            where = (str(directory),) if made.requires_logging_directory else ()
            self.trackers.append(made(projects.get(kind, PROJECT), *where, **options.get(kind, {})))

    def begin(self) -> None:
        """Begin or continue the run, unless this was done before. Raises ConfigError if a tracker cannot start."""
        if self._begun:
            return
        for tracker in self.trackers:
            try:
                tracker.start()
            except Exception as error:  # whatever a tracker raises without its key, its server, its disk
                raise ConfigError(f"trainer.report_to: {tracker.name} cannot start: {_one_line(error)}") from error
            if tracker.name == "mlflow":
                self._run["mlflow_id"] = tracker.tracker.info.run_id
        self._begun = True
        if self.trackers:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._run))

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Begin the run if needed, then send a step's numbers to every tracker. A failure to send is only logged."""
        self.begin()
        numbers = {f"train/{tag}": value for tag, value in by_tag(metrics).items()}
        for tracker in self.trackers:
            try:
                tracker.log(numbers, step=self.step)
            except Exception as error:
                log.warning("the metrics of step %d did not reach %s: %s", self.step, tracker.name, _one_line(error))

    def close(self) -> None:
        """Let the trackers finish their files."""
        for tracker in self.trackers if self._begun else ():
            tracker.finish()
        self._begun = False


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())
