"""A user's function as a rewarder, in processes of its own (`child.py`).

A process is started again after a fault or a change of the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ...core.config.file import inherited
from ...core.config.rollouts import RewardsConfig
from ...core.config.root import Config
from ...core.guard import start_guarded
from ...core.json_text import encoded_parts, loads
from .model import Away, Json, NoReward
from .rewarders import GivenScore, Rewarder, together

START_S = 60.0  # for the file's imports
KILL_AFTER_S = 0.5  # after SIGTERM
LONGEST_ANSWER = 2**20


class FunctionProcess:
    """One process with the function, which answers one rollout at a time. `version`: of the file that it has loaded."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config, self.version, self._lifeline = config, "", -1
        self._process: asyncio.subprocess.Process | None = None

    async def load(self) -> None:
        """Load the function, unless this version of its file is loaded. Raise Away."""
        config = self._config
        try:
            version = hashlib.sha256(config.file.read_bytes()).hexdigest()[:12]
        except OSError as error:
            raise Away(f"{config.function}: cannot read {config.file}: {error.strerror}") from None
        if self._process is not None and self._process.returncode is None and self.version == version:
            return
        await self.close()
        self._process, self._lifeline = await start_guarded(
            sys.executable, str(Path(__file__).with_name("child.py")), str(config.file), config.name,
            grace_s=KILL_AFTER_S, env=inherited(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_ANSWER,
        )  # fmt: skip
        try:
            await self._answer(START_S)
        except NoReward as error:
            await self.close()
            raise Away(f"{config.function}: {error}") from None
        self.version = version

    async def ask(self, rollout: bytes) -> dict[str, float]:
        """Return the rewards of a rollout, a line of JSON, by name. Raise Away, NoReward."""
        await self.load()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(rollout + b"\n")
        return await self._answer(self._config.timeout_s)

    async def close(self) -> None:
        """End the process and whatever the function started."""
        process, self._process = self._process, None
        if process is not None:
            os.close(self._lifeline)
            await process.communicate()

    async def _answer(self, limit_s: float) -> dict[str, float]:
        """The process's next answer. A process that is late or ends, or has a cancelled caller, is ended."""
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                line = await self._process.stdout.readline()
            if not line:
                raise NoReward(f"its process ended (exit code {await self._process.wait()})")
            answer: Json = loads(line)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise NoReward(f"no answer within {limit_s:g} s") from None
            if isinstance(error, ValueError):
                raise NoReward("its answer is too long, or no JSON") from None
            raise
        if "error" in answer:
            raise NoReward(answer["error"])
        return dict(answer["values"])


class Function(Rewarder):
    """Asks the function in one of `rewards.processes` processes."""

    label = "rewards.function"

    def __init__(self, whole: Config) -> None:
        config = whole.rewards
        super().__init__("function", config.name, whole)
        self.at_once = config.processes
        self._processes = [FunctionProcess(config) for _ in range(config.processes)]
        self._free: asyncio.Queue[FunctionProcess] = asyncio.Queue()
        for process in self._processes:
            self._free.put_nowait(process)

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[FunctionProcess]:
        """Yield a free process that has loaded the function. Raise Away."""
        process = await self._free.get()
        try:
            await process.load()
            yield process
        finally:
            self._free.put_nowait(process)

    async def check(self) -> None:
        await self.source()

    async def source(self) -> str:
        async with self.loaded() as process:
            return f"function:{self.name}@{process.version}"

    async def scores(self, rollout: Json) -> list[GivenScore]:
        seen = await asyncio.to_thread(lambda: b"".join(encoded_parts(rollout)))
        async with self.loaded() as process:
            return [GivenScore(value, name=name) for name, value in (await process.ask(seen)).items()]

    async def close(self) -> None:
        await together(process.close() for process in self._processes)
