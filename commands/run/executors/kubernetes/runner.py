"""Runs agent programs as Kubernetes Jobs, one for each run."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from .....proxy.config.run import RunConfig
from .....proxy.errors import ConfigError
from ...output import Keeping, ProgramLog
from ...runner import CANNOT_START, RunLost, RunTimedOut
from ..address import reached_at
from .cluster import Cluster, ClusterError
from .manifests import JOB, ROLLOUT, RUN, Manifests
from .output import Output
from .pods import PodState
from .watch import PodWatch

CREATED_S = 5.0  # that a cancelled run waits for its Job to be there, so that it can be deleted
WAITS_S = 30.0  # until a line says that a pod does not start


class KubernetesRunner:
    """Creates a Job with a Secret for each run, follows its pod's status and log, and deletes it all."""

    def __init__(self, config: RunConfig, command: Sequence[str], say: Callable[[str], None], keeping: Keeping) -> None:
        if config.proxy_url is None:
            raise ConfigError(
                "executor kubernetes needs --proxy-url (run.proxy_url): the proxy's address as pods reach it"
            )
        self._config, self._say, self._keeping, self._reported = config, say, keeping, set[str]()
        self._start_timeout_s = config.kubernetes.start_timeout_s
        self._name = f"lightning-{secrets.token_hex(4)}"
        self._manifests = Manifests(config.kubernetes, command, self._name)
        self._ids = itertools.count()
        self._connecting = asyncio.Lock()
        self._cluster: Cluster | None = None
        self._pods: PodWatch | None = None

    async def run(self, env: Mapping[str, str], log: Path, limit_s: float | None = None) -> int:
        cluster, pods = await self._connected()
        name = f"{self._name}-{next(self._ids)}"
        env = reached_at(self._config.proxy_url, env)
        pods.expect(name)
        try:
            async with Output(cluster, ProgramLog(log, self._keeping)) as output:
                uid = await _to_its_end(cluster.create_job(self._manifests.job(name, env)))
                await cluster.create_secret(self._manifests.secret(name, env, uid))
                return await self._until_it_ends(cluster, pods, name, output, limit_s)
        finally:
            pods.forget(name)
            try:
                await cluster.delete_job(name)
            except ClusterError as error:
                self._say(f"Job {name} is left there: {error.message}")

    async def end_left(self, rollout_ids: Collection[str]) -> None:
        """Delete the Jobs of these rollouts, which another run has left there."""
        try:
            cluster, _ = await self._connected()
            for pod in (one["metadata"] for one in await cluster.labelled_pods(RUN)):
                if pod.get("annotations", {}).get(ROLLOUT) in rollout_ids:
                    await cluster.delete_job(pod["labels"][JOB])
        except ClusterError as error:
            self._say(f"Jobs of a run that was killed may be left there: {error.message}")

    async def close(self) -> None:
        if self._pods is not None:
            await self._pods.close()
        if self._cluster is not None:
            await self._cluster.close()

    async def _connected(self) -> tuple[Cluster, PodWatch]:
        async with self._connecting:
            if self._cluster is None:
                settings = self._config.kubernetes
                self._cluster = await Cluster.connect(settings.context, settings.namespace, f"{RUN}={self._name}")
            if self._pods is None:
                self._pods = PodWatch(self._cluster)
            return self._cluster, self._pods

    async def _until_it_ends(
        self, cluster: Cluster, pods: PodWatch, name: str, output: Output, limit_s: float | None
    ) -> int:
        begun, until = time.monotonic(), math.inf
        state: PodState | None = None
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:  # deleting the Job sends SIGTERM, and SIGKILL after terminationGracePeriodSeconds
                raise RunTimedOut("the program was ended")
            state = await pods.next(name, min(WAITS_S, self._start_timeout_s, left_s)) or state
            if state is None or state.phase in ("waiting", "refused"):
                waited_s = time.monotonic() - begun
                if waited_s >= WAITS_S:
                    self._tell(state)
                if state is None and (why := await cluster.failure(name)) is not None:
                    raise RunLost(f"the Job has no pod: {why}")
                if state is not None and state.phase == "refused" and waited_s >= self._start_timeout_s:
                    output.add(f"the container cannot start: {state.message}")
                    return CANNOT_START
            elif state.phase == "lost":
                raise RunLost(f"the pod was lost: {state.message}")
            else:
                output.follow(state.pod)
                if limit_s is not None:
                    until = min(until, time.monotonic() + limit_s)
                if state.code is not None:
                    await output.complete()
                    output.add(state.message)
                    return state.code

    def _tell(self, state: PodState | None) -> None:
        """Say why the run waits, each reason once."""
        message = (state.message if state is not None else "") or "no pod starts"
        if message not in self._reported:
            self._reported.add(message)
            self._say(f"waiting for Kubernetes: {message}")


async def _to_its_end(creating: Coroutine[Any, Any, str]) -> str:
    """Wait for a creation. If cancelled, wait a little longer: an object deleted before it is made would stay."""
    task = asyncio.create_task(creating)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,), timeout=CREATED_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
