"""The sections `rollouts` and `rewards`: when a rollout ends by itself, and who says what it was worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from .section import Seconds, Section


class RolloutsConfig(Section):
    end_after_idle_s: Seconds | None = None


class RewardsConfig(Section):
    function: str | None = None
    timeout_s: Seconds = 30.0
    processes: Annotated[int, Field(ge=1, le=64)] = 1

    @property
    def file(self) -> Path:
        """Return the file of `function`. Call it only if there is a function."""
        return Path((self.function or "").rpartition(":")[0]).expanduser().absolute()

    @property
    def name(self) -> str:
        """Return the name of `function` in its file. Call it only if there is a function."""
        return (self.function or "").rpartition(":")[2]

    @field_validator("function")
    @classmethod
    def _names_file_and_function(cls, function: str | None) -> str | None:
        if function is not None:
            file, _, name = function.rpartition(":")
            if not file.endswith(".py") or not name.isidentifier():
                raise ValueError(f"a file and a function in it are needed, as in scoring.py:reward, got {function!r}")
        return function
