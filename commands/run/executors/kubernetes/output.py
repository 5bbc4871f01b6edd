"""The log of one run: its container's output, as it is written."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp

from ...output import ProgramLog
from .cluster import Cluster, ClusterError

END_S = 10.0  # for the rest, once the program has ended


class Output:
    """Follows the container's log into a file. `async with` closes the file."""

    def __init__(self, cluster: Cluster, log: ProgramLog) -> None:
        self._cluster, self._log = cluster, log
        self._pod = ""
        self._following: asyncio.Task[bool] | None = None

    async def __aenter__(self) -> Output:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        self._log.close()

    def follow(self, pod: str) -> None:
        """Begin, unless it has begun."""
        if self._following is None:
            self._pod = pod
            self._following = asyncio.create_task(self._cluster.follow_log(pod, self._log.write))

    async def complete(self) -> None:
        """Wait for the rest of the output, once the program has ended. Read it again if the connection broke."""
        assert self._following is not None
        complete = False
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                complete = await self._following
        if complete:
            return
        try:
            output = await self._cluster.log(self._pod)
        except (ClusterError, aiohttp.ClientError, TimeoutError) as error:
            self.add(f"the rest of the output could not be read: {error}")
            return
        self._log.restart()
        self._log.write(output)

    def add(self, line: str) -> None:
        """Add a line of ours."""
        if line:
            self._log.write(f"{line}\n".encode())
