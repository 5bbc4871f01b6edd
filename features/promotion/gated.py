"""Publishes new weights as candidates (`promotion.mode: gated`), which the proxy's gate then tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...core.config.root import Config
from ...core.errors import PublishError
from ...core.records import PolicyVersion
from ...serving.swap import Check, Superseded, Swap
from ...store.store import Store
from ...store.training import Step
from ...trainer.publish import Publisher
from ...trainer.step.engine import TrainingEngine
from ...trainer.types import Sample
from .promotions import Promotions


class CandidateSwap(Swap):
    """Gives a candidate's merged weights to the last server while another version stays live."""

    async def place(self, version: PolicyVersion, begin: Callable[[], Awaitable[None]], check: Check) -> None:
        async with self._locked():
            await self._require_successor(version, None)
            await self._give_all(version, self.vllm.servers[-1:], check, begin)


class GatedPublisher(Publisher):
    """Publishes new versions as candidates, and begins their tests."""

    _swap: CandidateSwap

    def __init__(self, config: Config, store: Store, swap: CandidateSwap, trainer: TrainingEngine) -> None:
        super().__init__(config.policy, store, swap, trainer)
        self._tests = Promotions(store.database)
        self._max_staleness = config.trainer.max_staleness

    def is_done(self, live: PolicyVersion, last: Step) -> bool:
        """Return whether the last step's version was tested or is being tested."""
        return last.version is not None

    async def builds_on(self, base: int, live: PolicyVersion) -> bool:
        test = await self._tests.under_way()
        return base == live.version or (test is not None and (test.version, test.against) == (base, live.version))

    async def waits_for(self, base: int) -> str | None:
        """Return why to wait if the weights are more than `max_staleness` versions ahead of the live one; else None."""
        live = await self._store.versions.live()
        newest = await self._store.steps.newest(self._max_staleness + 1, brief=True)
        ahead = (base != live.version) + sum(step.version is None and step.base == base for step in newest)
        if ahead <= self._max_staleness:
            return None
        return (
            f"the gate: the trained weights are {ahead} versions ahead of the live one, and rollouts may be "
            f"at most {self._max_staleness} behind (trainer.max_staleness)"
        )

    async def late(self, base: int) -> Step | None:
        """Return the last step if it is unpublished, began with version `base`, and no test is running; else None."""
        last = await self._store.steps.last()
        if last is None or last.version is not None or last.base != base:
            return None
        return None if await self._tests.under_way() else last

    async def _publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> Mapping[str, Any]:
        """Serve and verify a version next to the live one, and begin its test. Return {} if another test is running."""
        live = await self._store.versions.live()
        if not await self.builds_on(base, live):
            raise Superseded(f"policy version {live.version} is live, and these weights do not build on it")
        if await self._tests.under_way() is not None:
            return {}
        version = await self._save(step, metrics)
        begin = partial(self._tests.begin, version.version, step, live.version)
        verification = self._verification(version, samples)
        try:
            if self._swap.mode == "lora":
                await verification.load(stop)
                await begin()
            else:
                await self._swap.place(version, begin, verification.on)
        except (PublishError, Superseded) as error:
            await self._store.versions.failed(version.version, str(error))
            raise
        self.remember_served()
        return {"version": version.version, **verification.metrics}
