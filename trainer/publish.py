"""Publishes new weights: save, load into vLLM, verify, make live. Waits and tries again while vLLM is away.

Merged weights on a single server replace the live ones: they go live first, are verified by the answers that agents get
while the trainer goes on, and are taken back if they do not verify. No weights move before that. `VersionFiles` decides
which versions keep their files.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from ..core.config.policy import PolicyConfig
from ..core.errors import (
    LightningError,
    NotSaved,
    PublishError,
    TrainingUnavailable,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from ..core.records import PolicyVersion, Rollout
from ..serving.mode import other_mode
from ..serving.swap import Superseded, Swap
from ..serving.vllm import VllmFault, VllmFleet
from ..store.store import Store
from ..store.training import Step
from .step.engine import TrainingEngine
from .types import BackgroundWork, Sample
from .verify import MORE_ANSWERS, Verifier, WeightEvidence
from .waiting import before_retry, in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")
SamplesOf = Callable[[Sequence[Rollout]], Awaitable[list[Sample]]]
FAULTS = 10  # so many errors of vLLM's own end the publishing

# When agents' answers have not shown which weights vLLM serves, an idle trainer asks it itself: after so long without
# another answer, and in any case so long after the version went live.
QUIET_S = 5.0
LONGEST_S = 60.0
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
        """Run between two steps. `samples_of` gives the rows of rollouts that were trained on."""

    async def verify_live(
        self, base: int, samples_of: SamplesOf, stop: asyncio.Event, *, idle: bool = False
    ) -> Mapping[str, Any]:
        """Have version `base` verified, if it is live and was not. Return the step's metrics about it.

        `idle`: only if agents' answers suffice, or no more of them come. Raises what `Publisher.publish` does, but not
        Superseded.
        """
        return {}

    async def warn_of_another_mode(self) -> None:
        """Warn once if another process has since been configured to publish in another way."""

    def remember_served(self) -> None:
        """Take the trainer's present weights for the live ones: the next version is told from them."""

    async def take_back(self, version: int, base: int) -> None:
        """Make `base` live again in place of `version`. If vLLM cannot load it now, the proxy keeps trying."""

    async def abandon_unfinished(self, why: str = "") -> None:
        """Mark the versions that were being published as failed, and remove their files."""


@dataclass(slots=True)
class Unverified:
    """A version that agents get and that is not verified yet.

    `samples`: what vLLM is asked with. `evidence`: of the rollouts that were `seen`. `wanted`: so many more are to be
    there before an idle trainer scores their answers. `heard`: of so many rollouts, last at `heard_at` of the monotonic
    clock; `since`: when that began.
    """

    version: int
    samples: Sequence[Sample]
    wanted: int
    evidence: WeightEvidence = field(default_factory=WeightEvidence)
    seen: set[str] = field(default_factory=set)
    heard: int = 0
    heard_at: float = field(default_factory=monotonic)
    since: float = field(default_factory=monotonic)

    @property
    def is_quiet(self) -> bool:
        """Return whether waiting for agents' answers has taken long enough."""
        return monotonic() >= min(self.heard_at + QUIET_S, self.since + LONGEST_S)

    def hear(self, rollouts: int) -> None:
        """Take note that there are so many rewarded rollouts of the version."""
        if rollouts > self.heard:
            self.heard, self.heard_at = rollouts, monotonic()


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
        self.background = BackgroundWork()
        self.measured: dict[str, Any] = {}  # the step's metrics about the verification of what was published last
        self._other_mode: str | None = None  # the warning about it
        self._unverified: Unverified | None = None

    async def publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> PolicyVersion:
        """Make the weights of `step`, which began with version `base`, live, however long vLLM is away.

        The version is verified, unless it replaces the only server's merged weights: `verify_live` has that done.
        Raises Superseded if another version was made live; PublishError, with `base` live again, if vLLM does not serve
        the weights; Stopped if `stop` is set meanwhile; VllmFault, and the version is abandoned, if vLLM is there but
        meets an error of its own `FAULTS` times; TrainingUnavailable, and the version is forgotten.
        """
        await self.background.before_publishing(stop)
        work = partial(self._publish, step, samples, metrics, base, stop)
        return await self._until_done(f"publishing step {step}", work, stop)

    async def _until_done(self, what: str, work: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T:
        """Do the work, again and again while vLLM or space is missing."""
        faults = 0
        while True:
            try:
                return await work()
            except TrainingUnavailable:  # the loop continues as after a restart
                await self._forget_unfinished()
                raise
            except (UpstreamUnreachable, UpstreamTimeout, NotSaved) as error:
                faults = faults if isinstance(error, NotSaved) else 0
                log.warning("%s waits: %s", what, error)
            except VllmFault as error:
                faults += 1
                if faults == FAULTS:
                    await self.abandon_unfinished(error.message)
                    raise
                log.warning("%s is tried again (%d of %d): %s", what, faults, FAULTS - 1, error)
            await before_retry(stop)
            await self._forget_unfinished()

    async def _publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> PolicyVersion:
        await self._swap.vllm.models()  # if vLLM is away, fail before a version is reserved
        version = await self._save(step, metrics)
        self.measured = {}
        try:
            if self._swap.mode == "lora":
                await self._swap.unload(version)  # adapters of this name from another store, perhaps
                await self._verifier.load_and_verify(version, samples, stop)
                await self._swap.activate(version, version.step, expected=base, verified=True)
            elif len(await self._swap.vllm.reachable()) > 1:  # one server after another: verified there, then live
                roll = partial(self._swap.roll, version, version.step, base)
                await self._verifier.give_checked(version, samples, roll, stop)
            else:
                await self._swap.activate(version, version.step, expected=base)
                self._unverified = self._new(version, samples)
                return await self._store.versions.get(version.version)
        except (PublishError, Superseded) as error:
            await self._refuse(version, base, error)
            raise
        self.measured = self._verifier.measured
        return await self._store.versions.get(version.version)

    # Verifying what is live -----------------------------------------------------------------------------------------

    async def verify_live(
        self, base: int, samples_of: SamplesOf, stop: asyncio.Event, *, idle: bool = False
    ) -> Mapping[str, Any]:
        live = await self._store.versions.live()
        if live.version != base or live.verified or not live.publish == self._swap.mode == "merged":
            return {}
        if (step := await self._store.steps.of_version(base)) is None:
            return {}
        if self._unverified is None or self._unverified.version != base:  # made live by hand, or before a restart
            self._unverified = self._new(live, await samples_of(await self._store.steps.rollouts_of(step.step)))
        unverified, answered = self._unverified, await self._answered_by(live)
        unverified.hear(len(answered))
        waits = idle and not unverified.is_quiet
        rollouts = [found for found in answered if found.rollout_id not in unverified.seen]
        if waits and (len(rollouts) < unverified.wanted or not unverified.evidence.may_become_clear):
            return {}
        unverified.wanted = MORE_ANSWERS
        some = rollouts[:MORE_ANSWERS] if waits else rollouts  # a batch that is complete meanwhile waits for no more
        rows = self._rows(some, unverified.seen, samples_of)
        if not await self._verifier.sees_new_weights_in(rows, unverified.evidence):
            if waits:
                return {}
            ask = partial(self._ask, live, step.base, unverified.samples, stop)
            try:
                await self._until_done(f"verifying policy version {base}", ask, stop)
            except Superseded as error:
                log.warning("policy version %d is not verified: %s", base, error)
                return {}
        return await self._note_verified(step, base)

    def _new(self, version: PolicyVersion, samples: Sequence[Sample]) -> Unverified:
        return Unverified(version.version, samples, min(self._config.verify_samples, SEEN_ROLLOUTS))

    async def _answered_by(self, version: PolicyVersion) -> list[Rollout]:
        """Rewarded rollouts of the version alone. Of several servers nothing is known by them."""
        if len(self.vllm.servers) > 1:
            return []
        return await self._store.rollouts.rewarded_of(version.version, SEEN_ROLLOUTS)

    async def _rows(self, rollouts: Iterable[Rollout], seen: set[str], samples_of: SamplesOf) -> AsyncIterator[Sample]:
        """The shortest row of each rollout that has any. It is `seen` then."""
        for rollout in rollouts:
            seen.add(rollout.rollout_id)
            if rows := await samples_of([rollout]):
                yield min(rows, key=lambda row: len(row.token_ids))

    async def _ask(self, version: PolicyVersion, base: int, samples: Sequence[Sample], stop: asyncio.Event) -> None:
        """Have vLLM's own answers verify the live version. If they do not, `base` is live again."""
        try:
            await self._verifier.verify_merged(version, samples, stop)
        except PublishError as error:
            await self._refuse(version, base, error)
            raise

    async def _refuse(self, version: PolicyVersion, base: int, error: LightningError) -> None:
        """Note why a version does not count, and name who was answered by it. Merged weights are taken back."""
        went_live = (await self._store.versions.live()).version == version.version
        await self._store.versions.failed(version.version, str(error))
        if isinstance(error, PublishError) and self._swap.mode == "merged" and went_live:
            if named := [r.rollout_id for r in await self._store.rollouts.rewarded_of(version.version, SEEN_ROLLOUTS)]:
                more = " and maybe others" if len(named) == SEEN_ROLLOUTS else ""
                log.error("answered by version %d, not trained on: %s%s", version.version, ", ".join(named), more)
            await asyncio.shield(self.take_back(version.version, base))

    async def _note_verified(self, step: Step, version: int) -> Mapping[str, Any]:
        """Note that a version is verified, and before it, with the step that made it, how clearly."""
        measured = self._verifier.measured
        await self._store.steps.update_metrics(step.step, step.metrics | measured)
        self._trainer.trackers.report(measured)
        await self._store.versions.verified(version)
        self._unverified = None
        return measured

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
        """Return whether the last step's weights are live, and published in the configured way."""
        return last.version == live.version and live.publish == self._swap.mode

    def is_of_another_mode(self, live: PolicyVersion) -> bool:
        return live.publish not in (None, self._swap.mode)

    async def warn_of_another_mode(self) -> None:
        before, self._other_mode = self._other_mode, await other_mode(self._store, "trainer", self._swap.mode)
        if self._other_mode not in (None, before):
            log.error("%s", self._other_mode)

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


class VersionFiles:
    """The directories of policy versions, `policy.directory`/versions/vN."""

    def __init__(self, config: PolicyConfig, store: Store, swap: Swap) -> None:
        self._config = config
        self._store = store
        self._swap = swap
        self._directory = config.directory.absolute() / "versions"

    def path(self, version: int) -> Path:
        return self._directory / f"v{version}"

    async def delete(self, version: int) -> None:
        await asyncio.to_thread(shutil.rmtree, self.path(version), ignore_errors=True)

    async def remove(self, version: PolicyVersion) -> None:
        """Unload the version from vLLM and delete its files. It can never be promoted again."""
        if self._swap.mode == "lora":
            with suppress(LightningError):  # a server that is away has unloaded it already
                await self._swap.unload(version)
        await self._store.versions.forget_files(version.version)
        await self.delete(version.version)

    async def prune(self, keep: Set[int]) -> None:
        """Remove all versions but the newest, the live one, those of running rollouts, and those in `keep`.

        Versions that never went live (`promotion.mode: gated`) take no place among the newest: one of them is kept.
        """
        versions = await self._store.versions.with_files()
        tested = {v.version for v in versions if v.status in ("waiting", "candidate")}
        passed_by = [v for v in versions if v.live_at is None and v.status in ("ready", "rejected")]
        others = [v for v in versions if v not in passed_by]
        newest = {v.version for v in (*others[-self._config.keep_versions :], *passed_by[-1:])}
        kept = newest | tested | {(await self._store.versions.live()).version}
        if self._swap.mode == "lora":
            kept |= await self._store.versions.pinned(time.time() - self._config.pin_timeout_s)
        for version in versions:
            if version.version not in kept | keep:
                await self.remove(version)
