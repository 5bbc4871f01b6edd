"""Runs programs through a child process of ours that reads requests and writes reports, one JSON object a line."""

from __future__ import annotations

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...proxy.errors import LightningError
from .output import Keeping, piped
from .runner import RunLost, RunTimedOut


class ServedRunner(ABC):
    """The parent's side. The child is started by the first run, and ends when its stdin closes.

    The child's first line says that it is ready. It then gets a request with an `id` for each run, or {"kill": id}.
    Its reports are {"id", "code"}, {"id", "lost": why}, {"id", "late": true}, {"say": what} for a person, or
    {"failed": why}, which fails all runs.
    """

    name = "server"

    def __init__(
        self, argv: Sequence[str], say: Callable[[str], None] = lambda _: None, keeping: Keeping | None = None
    ) -> None:
        self._argv, self._say, self._keeping = tuple(argv), say, keeping or Keeping()
        self._child: asyncio.subprocess.Process | None = None
        self._running: dict[str, asyncio.Future[int]] = {}
        self._ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._why = f"the {self.name} ended while programs were running"

    @abstractmethod
    def _request(self, env: Mapping[str, str], log: Path) -> dict[str, Any]:
        """Return the request to the child for a run."""

    @abstractmethod
    async def _open(self, child: asyncio.subprocess.Process) -> None:
        """Wait until the child is ready. Raise LightningError if it will not be."""

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        async with self._starting:
            if self._child is None:
                self._child = await self._start()
        if self._reader is None or self._reader.done():
            raise LightningError(self._why)
        async with piped(log, self._keeping) as pipe:
            return await self._run(env, pipe, limit_s)

    async def _run(self, env: Mapping[str, str], pipe: Path, limit_s: float | None) -> int:
        name = str(next(self._ids))
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[name] = ended
        self._send({"id": name, "limit_s": limit_s, **self._request(env, pipe)})
        try:
            return await ended
        except asyncio.CancelledError:
            self._send({"kill": name})
            raise
        finally:
            del self._running[name]

    async def close(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            await self._child.wait()
        if self._reader is not None:
            await self._reader

    async def _start(self) -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            await self._open(child)
        except BaseException:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            raise
        assert child.stdout is not None
        self._reader = asyncio.create_task(self._read(child.stdout))
        return child

    async def _read(self, reports: asyncio.StreamReader) -> None:
        async for line in reports:
            report = json.loads(line)
            if "say" in report:
                self._say(report["say"])
                continue
            if "failed" in report:
                self._why = report["failed"]
                break
            ended = self._running.get(report["id"])
            if ended is None or ended.done():
                continue
            if "lost" in report:
                ended.set_exception(RunLost(report["lost"]))
            elif "late" in report:
                ended.set_exception(RunTimedOut("the program was ended"))
            else:
                ended.set_result(report["code"])
        for ended in self._running.values():
            if not ended.done():
                ended.set_exception(LightningError(self._why))

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
