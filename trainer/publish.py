"""Publishes new weights: save, load into vLLM, verify, make live. Waits and tries again while vLLM is away.

Merged weights on a single server replace the live ones: they go live first, are verified by the answers that agents get
while the trainer goes on, and are taken back if they do not verify. No weights move before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from ..proxy.config.policy import PolicyConfig
from ..proxy.errors import (
    LightningError,
    NotSaved,
    PublishError,
    TrainingUnavailable,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from ..proxy.policy.mode import otherwise
from ..proxy.policy.swap import Superseded, Swap
from ..proxy.policy.vllm import VllmFault, VllmFleet
from ..proxy.store.publishing import Decided
from ..proxy.store.store import Store
from ..proxy.store.training import Step
from ..proxy.types import PolicyVersion, Rollout
from .files.versions import VersionFiles
from .step.engine import TrainingEngine
from .types import Sample
from .verify import Verifier
from .waiting import Stopped, before_retry, in_thread

log = logging.getLogger(__name__)

SamplesOf = Callable[[Sequence[Rollout]], Awaitable[list[Sample]]]

FAULTS = 10  # so many errors of vLLM's own end the publishing
QUIET_S = 5.0  # after which an idle trainer asks vLLM itself, if agents' answers have not shown which weights it serves
SEEN_ROLLOUTS = 64  # of a version, at most, by whose answers it is verified


class NoPublisher:
    """Publishes nothing: weights stay with the trainer. A publisher overrides all methods."""

    publishes = False
    vllm: VllmFleet | None = None

    def is_due(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether the weights of a step are to be published."""
        return False

    async def builds_on(self, base: int, live: PolicyVersion) -> bool:
        """Return whether weights that build on version `base` build on the live one, too."""
        return base == live.version

    async def waits_for(self, base: int) -> str | None:
        """Return the reason why training on from version `base` must wait; None if it need not."""
        return None

    def is_of_another_mode(self, live: PolicyVersion) -> bool:
        """Return whether `policy.publish` was changed since the live version was published."""
        return False

    async def attend(self, samples_of: SamplesOf, stop: asyncio.Event) -> None:
        """Run between two steps. `samples_of` gives the rows of rollouts."""

    async def settle(self, samples_of: SamplesOf, stop: asyncio.Event) -> Mapping[str, Any]:
        """Have the live version verified, if it is not yet. Return the metrics about it.

        Raises what `Publisher.publish` does, but not Superseded.
        """
        return {}

    async def look_at_others(self) -> None:
        """Warn once if another process has since been configured to publish in another way."""

    def remember_served(self) -> None:
        """Take the trainer's present weights for the live ones: the next version is told from them."""

    async def take_back(self, version: int, base: int) -> None:
        """Make `base` live again in place of `version`. If vLLM cannot load it now, the proxy keeps trying."""

    async def abandon_unfinished(self, why: str = "") -> None:
        """Mark the versions that were being published as failed, and remove their files."""


@dataclass(slots=True)
class Unverified:
    """A version that agents get and that is not verified, and what it was published with.

    `wanted`: so many of its rollouts are to be there before an idle trainer looks at their answers.
    """

    version: PolicyVersion
    samples: Sequence[Sample]
    metrics: dict[str, Any]
    base: int
    wanted: int
    since: float = field(default_factory=monotonic)


class Publisher(NoPublisher):
    """Publishes the trainer's weights as policy versions. Nothing half-written is ever served."""

    publishes = True
    vllm: VllmFleet

    def __init__(
        self, config: PolicyConfig, store: Store, swap: Swap, trainer: TrainingEngine, name: str | None = None
    ) -> None:
        """`name`: what the names of adapters begin with, by default the alias."""
        self._config = config
        self._name = name or config.alias
        self._store = store
        self._swap = swap
        self._trainer = trainer
        self._verifier = Verifier(config, swap, trainer)
        self.files = VersionFiles(config, store, swap)
        self.vllm = swap.vllm
        self.measured: dict[str, Any] = {}  # the step's metrics about the verification of what was published last
        self._decided: Decided | None = None
        self._unverified: Unverified | None = None

    async def publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> PolicyVersion:
        """Make the weights of `step`, which began with version `base`, live, however long vLLM is away.

        The version is verified, unless it replaces the only server's merged weights: `settle` has that done.
        Raises Superseded if another version was made live; PublishError, with `base` live again, if vLLM does not serve
        the weights; Stopped if `stop` is set meanwhile; VllmFault, and the version is abandoned, if vLLM is there but
        meets an error of its own `FAULTS` times; TrainingUnavailable, and the version is forgotten.
        """
        faults = 0
        while True:
            try:
                return await self._publish(step, samples, metrics, base, stop)
            except TrainingUnavailable:  # the loop continues as after a restart
                await self._forget_unfinished()
                raise
            except (UpstreamUnreachable, UpstreamTimeout, NotSaved) as error:
                faults = faults if isinstance(error, NotSaved) else 0
                log.warning("publishing step %d waits: %s", step, error)
            except VllmFault as error:
                faults += 1
                if faults == FAULTS:
                    await self.abandon_unfinished(error.message)
                    raise
                log.warning("publishing step %d is tried again (%d of %d): %s", step, faults, FAULTS - 1, error)
            await before_retry(stop)
            await self._forget_unfinished()

    async def _publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> PolicyVersion:
        live = await self._store.versions.live()
        await self._swap.vllm.models()  # if vLLM is away, fail before a version is reserved
        only_unverified = live.step == step and live.publish == self._swap.mode == "merged" and not live.verified
        version = live if only_unverified else await self._save(step, metrics)
        made_by = await self._store.steps.of_version(live.version) if only_unverified else None
        base = made_by.base if made_by else base  # the trainer was killed after it made the version live
        try:
            if only_unverified:
                await self._verifier.verify_merged(version, samples, stop)
                await self._store.versions.verified(version.version)
            elif self._swap.mode == "lora":
                await self._beside(version, samples, base, stop)
            elif len(await self._swap.vllm.reachable()) > 1:
                await self._rolling(version, samples, base, stop)
            else:
                await self._swap.activate(version, version.step, expected=base)
                self._unverified = Unverified(version, samples, metrics, base, self._config.verify_samples)
        except (PublishError, Superseded) as error:
            went_live = (await self._store.versions.live()).version == version.version
            await self._store.versions.failed(version.version, str(error))
            if isinstance(error, PublishError) and self._swap.mode == "merged" and went_live:
                await self.take_back(version.version, base)
            raise
        self.measured = {} if self._unverified else self._verifier.measured
        return await self._store.versions.get(version.version)

    async def _beside(self, version: PolicyVersion, samples: Sequence[Sample], base: int, stop: asyncio.Event) -> None:
        """Load adapters beside the live ones: they are verified, then live."""
        await self._swap.unload(version)  # adapters of this name from another store, perhaps
        await self._verifier.load_and_verify(version, samples, stop)
        await self._swap.activate(version, version.step, expected=base, verified=True)

    async def _rolling(self, version: PolicyVersion, samples: Sequence[Sample], base: int, stop: asyncio.Event) -> None:
        """Replace the merged weights of one server after another: they are verified there, then live."""
        roll = partial(self._swap.roll, version, version.step, base)
        await self._verifier.give_checked(version, samples, roll, stop)

    # Verifying what is live -----------------------------------------------------------------------------------------

    async def attend(self, samples_of: SamplesOf, stop: asyncio.Event) -> None:
        """Verify while the trainer is idle: by agents' answers, or after `QUIET_S` by asking vLLM."""
        if (unverified := self._unverified) is None:
            return
        seen = await self._rollouts_of(unverified)
        if len(seen) >= unverified.wanted and await self._is_seen_in(seen, samples_of):
            await self._note_verified(unverified)
        elif monotonic() > unverified.since + QUIET_S:
            with suppress(Stopped):
                await self.settle(samples_of, stop)
        elif len(seen) >= unverified.wanted:
            unverified.wanted = 4 * len(seen)

    async def settle(self, samples_of: SamplesOf, stop: asyncio.Event) -> Mapping[str, Any]:
        if (unverified := self._unverified) is None:
            return {}
        live = await self._store.versions.live()
        if live.version != unverified.version.version or live.verified:  # made live by hand; verified after a fault
            self._unverified = None
            return {}
        if await self._is_seen_in(await self._rollouts_of(unverified), samples_of):
            return await self._note_verified(unverified)
        try:
            await self.publish(int(live.step or 0), unverified.samples, unverified.metrics, unverified.base, stop)
        except PublishError:
            log.error("not trained on, as version %d answered them: %s", live.version, await self._answered_by(live))
            raise
        except Superseded as error:
            log.warning("policy version %d is no longer verified: %s", live.version, error)
            self._unverified = None
            return {}
        return await self._note_verified(unverified)

    async def _rollouts_of(self, unverified: Unverified) -> list[Rollout]:
        return await self._store.rollouts.rewarded_of(unverified.version.version, SEEN_ROLLOUTS)

    async def _is_seen_in(self, rollouts: Sequence[Rollout], samples_of: SamplesOf) -> bool:
        return await self._verifier.is_seen_by_agents(await samples_of(rollouts))

    async def _note_verified(self, unverified: Unverified) -> Mapping[str, Any]:
        """Note that a version is verified, and how clearly, with the step that made it."""
        version, measured = unverified.version.version, self._verifier.measured
        if (step := await self._store.steps.of_version(version)) is not None:
            await self._store.steps.update_metrics(step.step, step.metrics | measured)
            self._trainer.trackers.report(measured)
        await self._store.versions.verified(version)
        self._unverified = None
        return measured

    async def _answered_by(self, version: PolicyVersion) -> str:
        found = await self._store.rollouts.rewarded_of(version.version, SEEN_ROLLOUTS)
        return ", ".join(rollout.rollout_id for rollout in found) or "none with a reward yet"

    # Files and old versions -----------------------------------------------------------------------------------------

    async def _save(self, step: int, metrics: dict[str, Any]) -> PolicyVersion:
        """Reserve the next version and write its weights."""
        number = await self._store.versions.new(self._swap.mode, step, metrics)
        path, lora = self.files.path(number), self._swap.mode == "lora"
        await in_thread(self._trainer.save_weights, path, merged=not lora)
        served = f"{self._name}-v{number}" if lora else await self._swap.vllm.base_model()
        await self._store.versions.saved(
            number, str(path), served, {own: f"{served}.{own}" for own in self._config.adapters}
        )
        return await self._store.versions.get(number)

    def is_due(self, step: int, metrics: Mapping[str, Any]) -> bool:
        return True

    def is_done(self, live: PolicyVersion, last: Step) -> bool:
        """Return whether the last step's weights are live and verified, and published in the configured way."""
        return last.version == live.version and live.verified and live.publish == self._swap.mode

    def is_of_another_mode(self, live: PolicyVersion) -> bool:
        return live.publish not in (None, self._swap.mode)

    async def look_at_others(self) -> None:
        decided, mode = await self._store.publishing.decided(), self._swap.mode
        if decided is None or decided == self._decided:
            return
        self._decided = decided
        if decided.mode != mode:
            log.error("%s", otherwise("trainer", mode, decided))

    def remember_served(self) -> None:
        self._verifier.remember_served()

    async def take_back(self, version: int, base: int) -> None:
        try:
            await self._swap.activate(await self._store.versions.get(base), expected=version)
        except Superseded:
            log.warning("policy version %d is not taken back: another one was made live", version)
        except LightningError as error:
            log.error("policy version %d is live again, but not in vLLM yet: %s", base, error.message)
            await self._store.versions.set_live(base)

    async def abandon_unfinished(self, why: str = "the trainer was stopped while it published this version") -> None:
        for version in await self._store.versions.of_status("publishing"):
            await self._store.versions.failed(version.version, why)
            await self.files.remove(version)

    async def _forget_unfinished(self) -> None:
        """Undo a try: the next one gets the same version number, because staleness is counted by version numbers."""
        for version in await self._store.versions.of_status("publishing"):
            await self._store.versions.forget_unfinished(version.version)
            await self.files.delete(version.version)
