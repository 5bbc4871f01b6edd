"""Publishes new weights as candidates (`promotion.mode: gated`). The proxy's gate decides which go live.

Training continues from the candidate's weights while it is tested. Once that is decided, the newest weights are tested.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...core.config.root import Config
from ...core.errors import PublishError
from ...core.records import PolicyVersion
from ...serving.mode import has_gpu
from ...serving.swap import Check, Superseded, Swap
from ...store.store import Store
from ...store.training import Step
from ...trainer.publish import Publisher
from ...trainer.step.engine import TrainingEngine
from ...trainer.types import Sample
from .config import PromotionConfig
from .promotions import Promotions

log = logging.getLogger(__name__)
UNSEEN_S = 60.0  # a proxy's gate looks at a test at once
# Said once where vLLM answers requests for the base model with an adapter.
MIXED = (
    "without a GPU, vLLM answers requests for the base model with the adapter of others in the same batch: a test "
    "against version 0 compares a mixture with the candidate; policy.publish merged with two servers does not "
    "(docs/training.md)"
)


class CandidateSwap(Swap):
    """Gives a candidate's merged weights to the last server, while another version stays live."""

    async def place(self, version: PolicyVersion, begin: Callable[[], Awaitable[None]], check: Check) -> None:
        """Give the weights to the server, as `roll` does, and `begin`."""
        async with self._locked():
            await self._require_successor(version, None)
            await self._give_all(version, self.vllm.servers[-1:], check, begin)


class GatedPublisher(Publisher):
    """Publishes versions that are not live yet. All state is in the store, so a restart changes nothing."""

    _swap: CandidateSwap

    def __init__(self, config: Config, store: Store, swap: CandidateSwap, trainer: TrainingEngine) -> None:
        super().__init__(config.policy, store, swap, trainer)
        self._tests = Promotions(store.database)
        self._every = config.section(PromotionConfig).every_steps
        self._max_staleness = config.trainer.max_staleness
        self._warned = False
        self._unseen: int | None = None  # the test about which it was logged that no proxy looks at it

    def is_done(self, live: PolicyVersion, last: Step) -> bool:
        """Return whether the last step's version was tested, or is."""
        return last.version is not None

    async def builds_on(self, base: int, live: PolicyVersion) -> bool:
        """Return whether `base` is the live version, or is tested against it."""
        test = await self._tests.under_way()
        return base == live.version or (test is not None and (test.version, test.against) == (base, live.version))

    async def waits_for(self, base: int) -> str | None:
        """Return the reason to wait where the weights are so far ahead that rollouts of the live version are stale."""
        live = await self._store.versions.live()
        newest = await self._store.steps.newest((self._max_staleness + 1) * self._every, brief=True)
        unpublished = sum(step.version is None and step.base == base for step in newest)
        ahead = (base != live.version) + unpublished // self._every
        if ahead <= self._max_staleness:
            return None
        return (
            f"the gate: its weights are {ahead} versions ahead of the live one, and rollouts may be "
            f"{self._max_staleness} behind (trainer.max_staleness)"
        )

    async def late(self, base: int) -> Step | None:
        """Return the last step if it came while a version was tested, and none is any more."""
        test, last = await self._tests.under_way(), await self._store.steps.last()
        if test is None:
            is_late = last is not None and last.version is None and last.base == base
            return last if last and is_late and await self._is_due(last.step, last.metrics, base) else None
        # A gate's first look leaves its numbers, also before any rollout.
        if not test.evidence and self._unseen != test.n and time.time() >= test.began_at + UNSEEN_S:
            self._unseen = test.n
            log.warning(
                "no proxy weighs policy version %d, so it will not be decided: give the proxy the trainer's "
                "configuration (promotion.mode: gated) and start it again", test.version,
            )  # fmt: skip
        return None

    async def _publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> Mapping[str, Any]:
        """Have a version served beside the live one, verify it, and begin its test. Do nothing while another has one.

        Every `every_steps` steps have one, and every run of fine-tuning.
        """
        live = await self._store.versions.live()
        if not await self.builds_on(base, live):
            raise Superseded(f"policy version {live.version} is live, and these weights were not trained on from it")
        if await self._tests.under_way() is not None or not await self._is_due(step, metrics, base):
            return {}
        version = await self._save(step, metrics)
        begin = partial(self._tests.begin, version.version, step, live.version)
        verification = self._verification(version, samples)
        try:
            if self._swap.mode == "lora":
                if live.version == 0 and not has_gpu() and not self._warned:
                    self._warned = True
                    log.warning(MIXED)
                await verification.load(stop)
                await begin()
            else:
                await self._swap.place(version, begin, verification.on)
        except (PublishError, Superseded) as error:
            await self._store.versions.failed(version.version, str(error))
            raise
        self.remember_served()
        return {"version": version.version, **verification.metrics}

    async def _is_due(self, step: int, metrics: Mapping[str, Any], base: int) -> bool:
        return "method" in metrics or step - ((await self._store.versions.get(base)).step or 0) >= self._every
