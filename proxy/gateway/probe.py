"""Sends the policy's servers the same prompt every few minutes, and notices when other weights answer it.

A label of weights proves nothing: anybody could have set it. Each version's first answer is kept. After every
restart of a server and every few minutes it is sampled again, with the same seed. This detects wholly other weights;
a single training step changes less than two servers' arithmetic may differ.
"""

from __future__ import annotations

import asyncio
import logging
import math
from time import monotonic
from typing import Any

from ...core.config.policy import PolicyConfig
from ...core.errors import LightningError
from ...core.records import PolicyVersion
from ...serving.health import Health, replica_name
from ...serving.vllm import VllmServer
from ...store.versions import Probed
from .watch import Watch

log = logging.getLogger(__name__)

PROBE_S = 120.0  # between two questions to one server
LOOK_S = 1.0  # until a restart is noticed
TOLERANCE = 0.2  # mean difference of log-probabilities; bfloat16 alone makes up to 0.1

# By position: the sampled token, and the log-probabilities of the most likely ones.
Answer = list[tuple[str, dict[str, float]]]


class Prober:
    """Compares what the servers sample with the live version's first answer. The store notes what is wrong."""

    def __init__(self, config: PolicyConfig, watch: Watch, health: Health) -> None:
        self._tolerance = config.verify_tolerance or TOLERANCE
        self._watch = watch
        self._swap = watch.swap
        self._health = health
        self._store = watch.swap.store
        self._probed: dict[str, tuple[PolicyVersion, float]] = {}  # by URL; with the time of the last question

    async def run(self) -> None:
        """Probe every server that needs it until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for server in self._swap.vllm.servers:
                try:
                    await self._look_at(server)
                except LightningError as error:  # it is away, has no such route, or the store is
                    log.debug("%s is not probed: %s", replica_name(server.base_url), error)

    async def _look_at(self, server: VllmServer) -> None:
        url, live = server.base_url, await self._store.versions.live_now()
        if self._health.problems.get((self._watch.upstream.name, url), "not seen yet") is not None:
            self._probed.pop(url, None)
            return
        if url not in self._probed:
            self._probed[url] = live, -math.inf
            self._watch.adds_usage[url] = await server.adds_usage()
        version, at = self._probed.get(url, (None, -math.inf))
        if version == live and monotonic() < at + PROBE_S:
            return
        self._probed[url] = live, monotonic()
        await self._compare(server, live)

    async def _compare(self, server: VllmServer, live: PolicyVersion) -> None:
        merged = self._swap.mode == "merged"
        if merged and not await self._swap.has_label(server, live):
            return
        if not merged and live.version == 0:
            return  # nothing can have replaced it: its operator routes load adapters only
        model = await server.base_model() if merged else str(live.served_model)
        answer = await server.probe(model)
        if await self._store.versions.live_now() != live or (merged and not await self._swap.has_label(server, live)):
            return  # other weights went live meanwhile
        first = await self._store.probes.of(live.version)
        if first is None or first.model != model:
            await self._store.probes.first(live.version, model, answer)
        else:
            await self._tell(server, live, first, difference(first.answer, answer))

    async def _tell(self, server: VllmServer, live: PolicyVersion, first: Probed, apart: float) -> None:
        problem = None
        if not apart <= self._tolerance:  # NaN too
            mend = f"`policy promote {live.version}`" if self._swap.mode == "merged" else "a restart of vLLM"
            name = self._watch.upstream.server_name(server.base_url)
            problem = (
                f"{name} does not answer as policy version {live.version} did: its "
                f"log-probabilities differ by {apart:.3g} on average ({self._tolerance:g} is allowed); {mend} loads "
                "the version again"
            )
        if problem != first.problem:
            log.log(logging.INFO if problem is None else logging.ERROR, "%s", problem or "the live version is back")
        await self._store.probes.found(live.version, problem)


def difference(first: list[Any], again: list[Any]) -> float:
    """Compute how far two answers' log-probabilities are apart, in nats on average; NaN if nothing can be compared.

    Positions count as long as the same tokens came before.
    """
    found: list[float] = []
    for (token, before), (other, now) in zip(first, again, strict=False):
        found += [abs(before[name] - now[name]) for name in before.keys() & now.keys()]
        if not before.keys() & now.keys():
            return math.inf
        if token != other:
            break
    return math.fsum(found) / len(found) if found else math.nan
