"""Stops a server: new calls are refused, running ones finish, and a second Ctrl-C cuts them off.

uvicorn's supervisor and what a server does with signals are no public API: pyproject.toml bounds uvicorn to the version
that the tests ran with.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from uvicorn import Config, Server
from uvicorn.supervisors import Multiprocess

log = logging.getLogger(__name__)

POLL_S = 0.1


class OneServer(Server):
    """A server in this process. `started` is called with its port, `stopping` with the number of open requests."""

    def __init__(self, config: Config, started: Callable[[int], None], stopping: Callable[[int], None]) -> None:
        super().__init__(config)
        self._has_started, self._is_stopping = started, stopping

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._has_started(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: Any = None) -> None:
        if self.server_state.tasks:
            self._is_stopping(len(self.server_state.tasks))
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            asyncio.get_running_loop().call_soon_threadsafe(self._cut_off)  # uvicorn would skip the app's clean-up
        else:
            super().handle_exit(sig, frame)

    def _cut_off(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


class SeveralServers(Multiprocess):
    """A supervisor of several servers, each in a process of its own."""

    def keep_subprocess_alive(self) -> None:
        before = [*self.processes]
        super().keep_subprocess_alive()
        for old, new in zip(before, self.processes, strict=True):
            if old is not new:
                code = old.exitcode or 0
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                log.error("worker %s died (%s): another was started", old.pid, how)

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()  # else clients that come now would wait for workers that take no more
        self.signal_queue.clear()
        super().terminate_all()

    def join_all(self) -> None:
        while running := [worker for worker in self.processes if worker.process.is_alive()]:
            wait([worker.process.sentinel for worker in running], POLL_S)
            if signal.SIGINT in self.signal_queue:
                for worker in running:
                    worker.kill()
                break
        super().join_all()
