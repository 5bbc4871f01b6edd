"""The sections `rollouts` and `rewards`: when a rollout ends by itself, and which function rewards it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, PlainSerializer, field_validator, model_validator

from ..errors import Unprocessable
from .section import Number, Seconds, Section

DEFAULT_RANGE = (-10_000.0, 10_000.0)
Range = Annotated[tuple[Number, Number], PlainSerializer(list, when_used="json")]


class RolloutsConfig(Section):
    end_after_idle_s: Seconds | None = None


class RewardsConfig(Section):
    function: str | None = None
    timeout_s: Seconds = 30.0
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    range: Range = DEFAULT_RANGE

    def require(self, value: float, param: str = "reward") -> None:
        """Raise Unprocessable for a reward that is outside of `range`."""
        low, high = self.range
        if not low <= value <= high:
            raise Unprocessable(f"{param}: {value:g} is outside of rewards.range, {low:g} to {high:g}", param=param)

    @model_validator(mode="after")
    def _has_a_range(self) -> RewardsConfig:
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range: the lower end comes first, as in [0, 1]; got {[*self.range]}")
        return self

    @property
    def longest_wait_s(self) -> float | None:
        """Return how long the function may take for a rollout that has ended; None without one."""
        return None if self.function is None else self.timeout_s

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
