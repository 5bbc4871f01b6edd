"""Follows all pods of one `run`, and tells each run of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .....proxy.errors import LightningError
from .cluster import Cluster
from .manifests import JOB
from .pods import PodState, state_of


class PodWatch:
    """Passes on a pod's state at each change. `expect` a run before its Job is there, and `forget` it at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._changes: dict[str, asyncio.Queue[PodState]] = {}
        self._pods: dict[str, Mapping[str, Any]] = {}  # by Job, as they were last seen
        self._watching = asyncio.create_task(self._watch())

    def expect(self, job: str) -> None:
        self._changes[job] = asyncio.Queue()

    def forget(self, job: str) -> None:
        self._changes.pop(job, None)
        self._pods.pop(job, None)

    async def next(self, job: str, timeout_s: float) -> PodState | None:
        """Return the next state of the Job's pod; None if there is none in time. Raise what ended the watching."""
        changes = asyncio.ensure_future(self._changes[job].get())
        try:
            await asyncio.wait((changes, self._watching), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not changes.done():
                changes.cancel()
        if changes.done() and not changes.cancelled():
            return changes.result()
        if self._watching.done():
            self._watching.result()
            raise LightningError("Kubernetes' pods are not watched any more")
        return None

    async def close(self) -> None:
        self._watching.cancel()
        with suppress(asyncio.CancelledError, LightningError):
            await self._watching

    async def _watch(self) -> None:
        async for kind, thing in self._cluster.pods():
            if kind == "LISTED":
                there = {pod["metadata"]["uid"] for pod in thing["items"]}
                for pod in [pod for pod in self._pods.values() if pod["metadata"]["uid"] not in there]:
                    self._tell(pod, deleted=True)
            else:
                self._tell(thing, deleted=kind == "DELETED")

    def _tell(self, pod: Mapping[str, Any], *, deleted: bool) -> None:
        job = pod["metadata"]["labels"][JOB]
        # Kubernetes may make a second pod for a Job. It is none of the run's: that ends with the first.
        if job in self._changes and self._pods.setdefault(job, pod)["metadata"]["uid"] == pod["metadata"]["uid"]:
            self._pods[job] = pod
            self._changes[job].put_nowait(state_of(pod, deleted=deleted))
