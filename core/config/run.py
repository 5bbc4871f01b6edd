"""The section `run`: on which machines `run`, `eval` and `optimize` start agent programs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..errors import ConfigError
from .section import Seconds, Section, check_url

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")


def is_script(command: Sequence[str]) -> bool:
    """Return whether the command is `python script.py …`."""
    return len(command) > 1 and _PYTHON.fullmatch(Path(command[0]).name) is not None and command[1].endswith(".py")


def require_program(command: Sequence[str]) -> None:
    """Raise ConfigError if a command line names no program, or no script."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r} to start")
    if is_script(command) and not Path(command[1]).is_file():
        raise ConfigError(f"there is no file {command[1]!r} for {command[0]} to run")


class RunConfig(Section):
    executor: Literal["local", "ray"] = "local"
    proxy_url: str | None = None
    timeout_s: Seconds | None = None
    log_mb: Annotated[float, Field(gt=0)] = 10.0

    @field_validator("proxy_url")
    @classmethod
    def _check_proxy_url(cls, url: str | None) -> str | None:
        if url is not None:
            check_url("proxy_url", url, is_vllm=False)
        return url
