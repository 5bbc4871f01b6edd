"""Publishes new weights as candidates (`promotion.mode: gated`). The proxy's gate decides which go live.

The newest version waits for its test while another one is tested, and training continues from its own weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from ...core.config.root import Config
from ...core.errors import Conflict, PublishError, UpstreamTimeout, UpstreamUnreachable
from ...core.records import PolicyVersion
from ...serving.mode import has_gpu
from ...serving.swap import Check, Superseded, Swap
from ...serving.vllm import VllmFault
from ...store.store import Store
from ...store.training import Step
from ...store.versions import Ancestor
from ...trainer.publish import Publisher
from ...trainer.step.engine import TrainingEngine
from ...trainer.types import Sample
from ...trainer.verify import SamplesOf
from ...trainer.waiting import Stopped, in_thread
from .config import PromotionConfig
from .promotions import Promotion, Promotions

log = logging.getLogger(__name__)
AGAIN_S = 10.0  # until a test that could not begin is tried again
UNSEEN_S = 60.0  # a proxy's gate looks at a test at once
TAKEN_BACK = ("rejected", "failed")


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
        self._again = 0.0
        self._warned = False
        self._unseen: int | None = None  # the test about which it was logged that no proxy looks at it

    def is_due(self, step: int, metrics: Mapping[str, Any]) -> bool:
        return "method" in metrics or step % self._every == 0

    def is_done(self, live: PolicyVersion, last: Step) -> bool:
        """Return whether the last step's version is there to be tested, or need not be."""
        return last.version is not None or not self.is_due(last.step, last.metrics)

    async def builds_on(self, base: int, live: PolicyVersion) -> bool:
        """Return whether `base` was trained on from the live one, with no rejected or failed one between."""
        if base == live.version:
            return True
        since = chosen_at(live, await self._tests.last_of(live.version))
        found = await self._store.versions.line(base, live.version, since)
        return builds_on(found, live.version, since)

    async def waits_for(self, base: int) -> str | None:
        """Return the reason to wait where the weights are so far ahead that rollouts of the live version are stale."""
        live = (await self._store.versions.live()).version
        if base - live <= self._max_staleness:
            return None
        return (
            f"the gate: its weights are {base - live} versions ahead of the live one, and rollouts may be "
            f"{self._max_staleness} behind (trainer.max_staleness)"
        )

    async def _publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> Mapping[str, Any]:
        live = await self._store.versions.live()
        if not await self.builds_on(base, live):
            raise Superseded(f"policy version {live.version} is live, and these weights were not trained on from it")
        version = await self._save(step, metrics)
        await self._tests.wait(version.version, step)
        if await self._tests.now() is None:
            return {"version": version.version, **await self._test(version, samples, stop)}
        log.info("policy version %d waits until the test under way is decided", version.version)
        return {"version": version.version}

    async def attend(self, samples_of: SamplesOf, stop: asyncio.Event) -> None:
        """Begin the test of a version that waits, once no other is tested. More steps may have been taken since."""
        test = await self._tests.now()
        if test is not None:
            await self._warn_if_nobody_looks(test.promotion)
        if monotonic() < self._again or test is not None:
            return
        version = await self._tests.waiting()
        step = None if version is None else await self._store.steps.of_version(version.version)
        last = await self._store.steps.last()
        if version is None or step is None or last is None or step.checkpoint is None:
            return
        if last.step != step.step:
            await in_thread(self._trainer.load, Path(step.checkpoint))
        try:
            samples = await samples_of(await self._store.steps.rollouts_of(step.step))
            measured = await self._test(version, samples, stop)
            await self._store.steps.update_metrics(step.step, step.metrics | measured)
        except Stopped:
            log.info("stopped before the test of policy version %d began: it still waits", version.version)
        finally:
            if last.step != step.step:
                await in_thread(self._trainer.load, Path(str(last.checkpoint)))

    async def _test(self, version: PolicyVersion, samples: Sequence[Sample], stop: asyncio.Event) -> dict[str, Any]:
        """Have a version served beside the live one, verify it, and begin its test. If vLLM is away, it waits on.

        Return the metrics of the verification. PublishError if vLLM does not serve the weights.
        """
        live = await self._store.versions.live()
        if not await self.builds_on(version.version, live):
            await self._tests.withdraw(f"version {live.version} is live, and it was not trained on from that")
            return {}

        async def begin() -> None:
            await self._tests.begin(version.version, live.version)

        verification = self._verification(version, samples)
        try:
            if self._swap.mode == "lora":
                self._warn_of_mixing(live)
                await verification.load(stop)
                await begin()
            else:
                await self._swap.place(version, begin, verification.on)
        except (UpstreamUnreachable, UpstreamTimeout, VllmFault, Conflict) as error:
            self._again = monotonic() + AGAIN_S
            log.warning("the test of policy version %d waits: %s", version.version, error)
            return {}
        except PublishError as error:
            await self._store.versions.failed(version.version, str(error))
            raise
        self.remember_served()
        return verification.metrics

    async def _warn_if_nobody_looks(self, test: Promotion) -> None:
        """Say once that no proxy weighs a test: a gate's first look leaves its numbers, also before any rollout."""
        if self._unseen == test.n or time.time() < test.began_at + UNSEEN_S:
            return
        self._unseen = test.n
        last = await self._tests.last_of(test.version)
        if last is not None and not last.evidence:
            log.warning(
                "no proxy weighs policy version %d, so it will not be decided: give the proxy the trainer's "
                "configuration (promotion.mode: gated) and start it again",
                test.version,
            )

    def _warn_of_mixing(self, live: PolicyVersion) -> None:
        """Say once where vLLM answers requests for the base model with an adapter."""
        if live.version == 0 and not has_gpu() and not self._warned:
            self._warned = True
            log.warning(
                "without a GPU, vLLM answers requests for the base model with the adapter of others in the same batch: "
                "a test against version 0 compares a mixture with the candidate; policy.publish merged with two "
                "servers does not (docs/training.md)"
            )


def builds_on(line: Sequence[Ancestor], live: int, since: float) -> bool:
    """Return whether a version was trained on from `live`, with no version between that was taken back or is too old.

    `line`: the version and those that it was trained on from, newest first.
    """
    later = [one for one in line if one.version != live]
    return len(later) < len(line) and all(one.status not in TAKEN_BACK and one.created_at >= since for one in later)


def chosen_at(live: PolicyVersion, test: Promotion | None) -> float:
    """Return when the live version was chosen by hand (Unix time); nothing is trained on from versions made before.

    0 if it was not. `test`: its last one. If that made it live, versions may have been trained on from it before.
    """
    by_gate = test is not None and test.status == "promoted" and test.decided_at == live.live_at
    return 0.0 if by_gate or live.live_at is None else live.live_at
