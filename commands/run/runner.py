"""The interface for running the agent program: here (programs.py), or on a cluster (executors/)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ...core.errors import LightningError
from ...core.guard import CANNOT_START as CANNOT_START


class RunLost(LightningError):
    """The machine under a run went away, through no fault of the program. Its outcome is not known."""


class ServerDied(LightningError):
    """The process of ours that had started the program died, and the program ended with it."""


class RunTimedOut(LightningError):
    """The program ran longer than its time limit, and was ended."""


class Runner(Protocol):
    """A way of running the agent program."""

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        """Run it once and return its exit code, negative for a signal. Cancelling the call kills it.

        `log` gets its stdout and stderr. A program that runs for `limit_s` gets SIGTERM with its process group,
        and SIGKILL a little later. Raise RunTimedOut then, RunLost if the machine goes away, ServerDied if a process of
        ours does, LightningError if no run can continue. Nothing that it started is left at the end.
        """

    async def close(self) -> None: ...
