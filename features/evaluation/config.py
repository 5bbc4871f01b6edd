"""The section `evaluation`: held-out tasks on which new versions are evaluated between steps."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from ...core.config.section import FeatureSection, Seconds


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class EvaluationConfig(FeatureSection):
    name = "evaluation"
    moved = {"trainer.eval": "evaluation"}

    tasks: Path | None = None
    command: Annotated[list[str], BeforeValidator(_words)] = []
    every_steps: Annotated[int, Field(ge=1)] = 10
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    timeout_s: Seconds = 600.0

    @model_validator(mode="after")
    def _has_tasks_and_a_command(self) -> EvaluationConfig:
        if (self.tasks is None) == bool(self.command):
            raise ValueError("evaluation needs both tasks (a file of held-out tasks) and command (the agent program)")
        return self
