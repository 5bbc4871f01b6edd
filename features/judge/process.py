"""Asks a user's reward function, in a process of its own that is started anew after a fault or a change of the file."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ...core.config.file import inherited
from ...core.config.rollouts import RewardsConfig
from ...core.guard import start_guarded
from ...core.json_text import encoded_parts
from .rewarder import Away, GivenScore, Json, NoReward, Rewarder, together

CHILD = Path(__file__).with_name("child.py")
START_S = 60.0  # for the file's imports
KILL_AFTER_S = 0.5  # after SIGTERM
LONGEST_ANSWER = 2**20


class NotLoaded(Away):
    """The function is not there, or its file cannot be run. The user may repair it meanwhile."""


class Loaded(NamedTuple):
    """A function that is loaded: the version of its file, and whether it declares that it reads the record alone."""

    version: str
    from_record: bool


class FunctionProcess:
    """One process with the function, which answers one rollout at a time. Close it at the end."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline = -1
        self._stamp: tuple[int, int] | None = None
        self._loaded = Loaded("", from_record=False)

    async def start(self) -> Loaded:
        """Load the function, unless this version of its file is loaded. Raise NotLoaded."""
        try:
            found = self._config.file.stat()
        except OSError as error:
            raise NotLoaded(f"cannot read {self._config.file}: {error.strerror}") from None
        stamp = (found.st_mtime_ns, found.st_size)
        if self._process is not None and self._process.returncode is None and self._stamp == stamp:
            return self._loaded
        await self.close()
        self._process, self._lifeline = await start_guarded(
            *(sys.executable, str(CHILD), str(self._config.file), self._config.name),
            grace_s=KILL_AFTER_S,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=inherited(),
            limit=LONGEST_ANSWER,
        )
        self._stamp = stamp
        try:
            answer = await self._next_line(START_S)
        except NoReward as error:
            raise NotLoaded(str(error)) from None
        if "version" not in answer:
            await self.close()
            raise NotLoaded(answer["error"])
        self._loaded = Loaded(answer["version"], answer["from_record"])
        return self._loaded

    async def ask(self, rollout: bytes) -> dict[str, float]:
        """Return the rewards of a rollout, a line of JSON, by name. Raise NotLoaded, NoReward."""
        await self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(rollout + b"\n")
        answer = await self._next_line(self._config.timeout_s)
        if "error" in answer:
            raise NoReward(answer["error"])
        values: dict[str, float] = answer["values"]
        return values

    async def close(self) -> None:
        """End the process and whatever the function started."""
        process, self._process = self._process, None
        if process is None:
            return
        os.close(self._lifeline)
        await process.communicate()

    async def _next_line(self, limit_s: float) -> dict[str, Any]:
        """The process's next line. A process that is late or ends, or whose caller is cancelled, is started anew."""
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                line = await self._process.stdout.readline()
            if not line:
                code = await self._process.wait()
                raise NoReward(f"its process ended (exit code {code})")
            answer: dict[str, Any] = orjson.loads(line)
            return answer
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise NoReward(f"no answer within {limit_s:g} s") from None
            if isinstance(error, ValueError):
                raise NoReward("its answer is too long, or no JSON") from None
            raise


class Function(Rewarder):
    """The rewarder `function`: asks a user's function in one of `rewards.processes` processes."""

    label = "rewards.function"

    def __init__(self, config: RewardsConfig) -> None:
        self.name, self.at_once, self._function = config.name, config.processes, config.function
        self._processes = [FunctionProcess(config) for _ in range(config.processes)]
        self._free: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        for process in self._processes:
            self._free.put_nowait(process)

    async def load(self) -> Loaded:
        """Load the function in a free process, if it is not yet. Raise NotLoaded."""
        async with self._process() as process:
            return await process.start()

    async def check(self) -> None:
        try:
            await self.load()
        except NotLoaded as error:
            raise NotLoaded(f"{self._function}: {error}") from None

    async def source(self) -> str:
        return f"function:{self.name}@{(await self.load()).version}"

    async def scores(self, rollout: Json) -> list[GivenScore]:
        seen = await asyncio.to_thread(lambda: b"".join(encoded_parts(rollout)))
        async with self._process() as process:
            values = await process.ask(seen)
        return [GivenScore(value, name=name) for name, value in values.items()]

    async def close(self) -> None:
        await together(process.close() for process in self._processes)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[FunctionProcess]:
        process = await self._free.get()
        try:
            yield process
        finally:
            self._free.put_nowait(process)
