"""The sections `rollouts`, `rewards` and `run`: when rollouts end, what rewards them, and where agent programs run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from ..errors import ConfigError, Unprocessable
from .section import Number, Seconds, Section, check_url

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
DEFAULT_RANGE = (-10_000.0, 10_000.0)


class RolloutsConfig(Section):
    end_after_idle_s: Seconds | None = None


class RewardsConfig(Section):
    function: str | None = None
    timeout_s: Seconds = 30.0
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    range: tuple[Number, Number] = DEFAULT_RANGE

    def require(self, value: float, param: str = "reward") -> None:
        """Raise Unprocessable for a reward outside `range`."""
        low, high = self.range
        if not low <= value <= high:
            raise Unprocessable(f"{param}: {value:g} is outside of rewards.range, {low:g} to {high:g}", param=param)

    def faults(self) -> Iterator[str]:
        if self.range[0] >= self.range[1]:
            yield f"range: the first number must be less than the second, as in [0, 1]; got {[*self.range]}"

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


class RunConfig(Section):
    executor: Literal["local", "ray"] = "local"
    proxy_url: Annotated[str, AfterValidator(lambda url: check_url("it", url, is_vllm=False))] | None = None
    timeout_s: Seconds | None = None


def is_script(command: Sequence[str]) -> bool:
    """Return whether the command is `python script.py …`."""
    return len(command) > 1 and _PYTHON.fullmatch(Path(command[0]).name) is not None and command[1].endswith(".py")


def require_program(command: Sequence[str]) -> None:
    """Raise ConfigError if a command line names a program or script that does not exist."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r} to start")
    if is_script(command) and not Path(command[1]).is_file():
        raise ConfigError(f"there is no file {command[1]!r} for {command[0]} to run")
