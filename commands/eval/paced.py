"""`eval --paced`: whoever starts the command says when each rollout may begin, and hears when it has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from ...core.errors import ConfigError
from ..run.backlog import BacklogGate


class PacedGate(BacklogGate):
    """Lets one group begin for each line of standard input. At its end the command ends, as by SIGTERM."""

    def __init__(self) -> None:
        self._lines = asyncio.Semaphore(0)

    async def __aenter__(self) -> None:
        try:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)
        except PermissionError:  # a file, or /dev/null
            raise ConfigError("--paced: standard input must be a pipe or a terminal") from None

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())

    async def wait(self) -> None:
        await self._lines.acquire()

    def ended(self, rollout_id: str) -> None:
        print(rollout_id, flush=True)

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 4096)
        for _ in range(data.count(b"\n")):
            self._lines.release()
        if not data:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)
