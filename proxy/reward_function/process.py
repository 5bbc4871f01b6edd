"""Asks a user's reward function, in a process of its own that is started anew after a fault or a change of the file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ..config.rollouts import RewardsConfig
from ..errors import ConfigError, Unprocessable

CHILD = Path(__file__).with_name("child.py")
START_S = 60.0  # for the file's imports
LONGEST_ANSWER = 2**20


class NotLoaded(Exception):
    """The function is not there, or its file cannot be run. The user may repair it meanwhile."""


class NoReward(Exception):
    """The function failed for a rollout, or took too long. It is not tried again."""


class Judgement(NamedTuple):
    """A function's answer about a rollout: rewards by name, and the version of its file."""

    values: dict[str, float]
    version: str


class Loaded(NamedTuple):
    """A function that is loaded: the version of its file, and whether it declares that it reads the record alone."""

    version: str
    from_record: bool


class FunctionProcess:
    """One process with the function, which answers one rollout at a time. Close it at the end."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
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
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(CHILD), str(self._config.file), self._config.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_ANSWER,
            start_new_session=True,  # Ctrl-C is for the proxy, and what the function starts ends with it
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

    async def ask(self, rollout: bytes) -> Judgement:
        """Ask about a rollout, a line of JSON. Raise NotLoaded, NoReward."""
        loaded = await self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(rollout + b"\n")
        answer = await self._next_line(self._config.timeout_s)
        if "error" in answer:
            raise NoReward(answer["error"])
        try:
            for name, value in answer["values"].items():
                self._config.require(value, name)
        except Unprocessable as error:
            raise NoReward(error.message) from None
        return Judgement(answer["values"], loaded.version)

    async def close(self) -> None:
        """End the process and whatever the function started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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


def source_of(config: RewardsConfig, version: str) -> str:
    """Return the `source` of rewards that this version of the function gave."""
    return f"function:{config.name}@{version}"


async def require_function(config: RewardsConfig) -> None:
    """Raise ConfigError if `rewards.function` names a function that cannot be loaded."""
    if config.function is None:
        return
    process = FunctionProcess(config)
    try:
        await process.start()
    except NotLoaded as error:
        raise ConfigError(f"rewards.function: {config.function}: {error}") from None
    finally:
        await process.close()
