"""Publishes new weights: save, load into vLLM, verify, make live. Retries while vLLM is down or the disk is full.

New versions are verified before they serve traffic, except merged weights on a single server, which go live first.
These are verified before the trainer's weights move again, by the answers that agents get or by sampling from vLLM. If
that fails, the previous version goes live again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..core.config.policy import DEFAULT_ADAPTER, PolicyConfig
from ..core.errors import LightningError, NotSaved, PublishError, TrainingUnavailable, UpstreamUnreachable
from ..core.records import PolicyVersion
from ..serving.mode import other_mode
from ..serving.swap import Superseded, Swap
from ..serving.vllm import AWAY, VllmFault, VllmServer
from ..store.store import Store
from ..store.training import Step
from ..store.versions import PINNED_S
from .step.engine import TrainingEngine
from .step.shortage import give_back
from .types import Sample
from .verify import MORE_ANSWERS, SamplesOf, Verification
from .waiting import before_retry, in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")
FAULTS = 10  # errors of vLLM's own that end the publishing

# When agents' answers have not shown which weights vLLM serves, an idle trainer asks it itself: after so long without
# another answer, and in any case so long after the version went live.
QUIET_S = 5.0
LONGEST_S = 60.0
SEEN_ROLLOUTS = 64  # of a version, at most, that verify it by their answers


class Publisher:
    """Publishes the trainer's weights as policy versions. Nothing half-written is ever served."""

    def __init__(
        self, config: PolicyConfig, store: Store, swap: Swap, trainer: TrainingEngine, name: str | None = None
    ) -> None:
        """`name`: the prefix of adapter names, by default `policy.alias`."""
        self.vllm = swap.vllm
        self._config, self._store, self._swap, self._trainer = config, store, swap, trainer
        self._name = name or config.alias
        self._versions = config.directory.absolute() / "versions"
        self._other_mode: str | None = None  # the warning about it
        self._last: Verification | None = None  # of the version that was published last, or is live
        self.remember_served()

    async def publish(
        self, step: int, samples: Sequence[Sample], metrics: dict[str, Any], base: int, stop: asyncio.Event
    ) -> Mapping[str, Any]:
        """Make the weights of `step` live in place of version `base`. Wait while vLLM is down or the disk is full.

        Return the new `version` and the metrics of its verification. Merged weights on the only server are verified
        later, by `verify_live`. Raises Superseded if another version was made live; PublishError if vLLM does not serve
        the weights (then `base` is live); Stopped if `stop` is set meanwhile; VllmFault after `FAULTS` internal errors
        of vLLM; TrainingUnavailable if the training service is down.
        """
        work = partial(self._publish, step, samples, metrics, base, stop)
        return await self._retry(f"publishing step {step}", work, stop)

    async def _retry(self, what: str, work: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T:
        """Do the work; retry while vLLM is down or the disk is full, and after a few internal errors of vLLM.

        Unlike `waiting.until_done`, it removes the half-published version before each retry.
        """
        faults = 0
        while True:
            try:
                return await work()
            except TrainingUnavailable:  # the loop continues as after a restart
                await self._forget_unfinished()
                raise
            except (*AWAY, NotSaved) as error:
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
    ) -> Mapping[str, Any]:
        servers = [*await self.vllm.ask(VllmServer.models)]  # if vLLM is down, fail before a version is reserved
        version = await self._save(step, metrics)
        verification = self._last = self._verification(version, samples)
        try:
            if self._swap.mode == "lora":
                await verification.load(stop)
                await self._swap.activate(version, step, expected=base, verified=True)
            elif len(servers) > 1:  # one server after another: verified there, then live
                await self._swap.roll(version, step, base, verification.on)
            else:
                await self._swap.activate(version, step, expected=base)
                return {"version": version.version}
        except (PublishError, Superseded) as error:
            await self._refuse(version, base, error)
            raise
        self.remember_served()
        return {"version": version.version, **verification.metrics}

    async def _save(self, step: int, metrics: dict[str, Any]) -> PolicyVersion:
        """Reserve the next version and write its weights."""
        number = await self._store.versions.new(self._swap.mode, step, metrics)
        path, lora = self._versions / f"v{number}", self._swap.mode == "lora"
        await in_thread(self._trainer.save_weights, path, merged=not lora)
        served = f"{self._name}-v{number}" if lora else await self.vllm.base_model()
        adapters = {own: f"{served}.{own}" for own in self._config.adapters}
        await self._store.versions.saved(number, str(path), served, adapters)
        return await self._store.versions.get(number)

    async def _refuse(self, version: PolicyVersion, base: int, error: LightningError) -> None:
        """Mark a version as failed, with the reason. If it went live, take it back and log the rollouts it answered."""
        went_live = (await self._store.versions.live()).version == version.version
        await self._store.versions.failed(version.version, str(error))
        if went_live:
            if named := [r.rollout_id for r in await self._store.rollouts.rewarded_of(version.version, SEEN_ROLLOUTS)]:
                more = " and maybe others" if len(named) == SEEN_ROLLOUTS else ""
                log.error(
                    "rollouts with answers from policy version %d are not trained on: %s%s",
                    version.version,
                    ", ".join(named),
                    more,
                )
            await asyncio.shield(self.take_back(version.version, base))

    async def take_back(self, version: int, base: int) -> None:
        """Make `base` live again in place of `version`. If vLLM cannot load it now, the proxy keeps trying."""
        try:
            await self._swap.activate(await self._store.versions.get(base), expected=version)
        except Superseded:
            log.warning("policy version %d is not taken back: another one was made live", version)
        except LightningError as error:
            log.error("policy version %d is live again, but not in vLLM yet: %s", base, error.message)
            await self._store.versions.set_live(base)

    # Verifying what is live -----------------------------------------------------------------------------------------

    def _verification(self, version: PolicyVersion, samples: Sequence[Sample]) -> Verification:
        return Verification(self._config, self._swap, self._trainer, version, samples)

    def remember_served(self) -> None:
        """Remember the trainer's current weights as served: verification must tell the next version from them."""
        for adapter in (DEFAULT_ADAPTER, *self._config.adapters):
            self._trainer.remember_served(adapter)

    async def verify_live(
        self, base: int, samples_of: SamplesOf, stop: asyncio.Event, *, idle: bool = False
    ) -> Mapping[str, Any]:
        """Verify version `base` if it is live, has merged weights and is not verified yet.

        Return the verification's metrics, if there was one. `samples_of` returns the rows of rollouts. With `idle`, do
        nothing while more answers are needed and expected. Raises what `publish` does, except Superseded.
        """
        live = await self._store.versions.live()
        if live.version != base or live.verified or not live.publish == self._swap.mode == "merged":
            return {}
        if (step := await self._store.steps.of_version(base)) is None:
            return {}
        if self._last is None or self._last.version.version != base:  # made live by hand, or before a restart
            self._last = self._verification(live, await samples_of(await self._store.steps.rollouts_of(step.step)))
        one_server = len(self.vllm.servers) == 1  # of several nothing is known by what they answered
        answered = await self._store.rollouts.rewarded_of(base, SEEN_ROLLOUTS) if one_server else []
        live_at = live.live_at or 0.0
        heard_at = max(live_at, *(rollout.ended_at or 0.0 for rollout in answered), 0.0)
        waits = idle and time.time() < min(heard_at + QUIET_S, live_at + LONGEST_S)
        more = [rollout for rollout in answered if rollout.rollout_id not in self._last.seen]
        if waits:
            more = more[:MORE_ANSWERS]  # a batch that is complete meanwhile waits for no more
            if len(more) < min(self._config.verify_samples, MORE_ANSWERS):
                return {}
        if not await self._last.by_agents(more, samples_of):
            if waits:
                return {}
            try:
                await self._retry(f"verifying policy version {base}", partial(self._ask, self._last, step), stop)
            except Superseded as error:
                log.warning("policy version %d is not verified: %s", base, error)
                return {}
        self.remember_served()
        metrics = self._last.metrics
        await self._store.steps.update_metrics(step.step, step.metrics | metrics)  # first, for a trainer that is killed
        self._trainer.trackers.report(metrics)
        await self._store.versions.verified(base)
        return metrics

    async def _ask(self, verification: Verification, step: Step) -> None:
        """Verify the live version by sampling from vLLM. If that fails, the version before is made live again."""
        version = verification.version
        give_back()  # vLLM may wait for the memory
        await self._swap.restore(set())
        try:
            await verification.on_all()
        except PublishError as error:
            if (live := await self._store.versions.live()).version != version.version:
                raise Superseded(f"policy version {live.version} was made live meanwhile") from None
            if not await self._swap.has_label(self.vllm, version):
                raise UpstreamUnreachable("vLLM restarted while its weights were being verified") from None
            await self._refuse(version, step.base, error)
            raise

    # What a gate decides otherwise ----------------------------------------------------------------------------------

    def is_done(self, live: PolicyVersion, last: Step) -> bool:
        """Return whether the last step's weights are live, and were published in the current mode."""
        return last.version == live.version and live.publish == self._swap.mode

    async def builds_on(self, base: int, live: PolicyVersion) -> bool:
        """Return whether weights that build on version `base` also build on the live one."""
        return base == live.version

    async def waits_for(self, base: int) -> str | None:
        """Return why training from version `base` must wait; None if it need not."""
        return None

    async def late(self, base: int) -> Step | None:
        """Return the last step, which began with version `base`, if its publishing was postponed and is now due."""
        return None

    # The mode, files and old versions -------------------------------------------------------------------------------

    def is_of_another_mode(self, live: PolicyVersion) -> bool:
        """Return whether the live version was published in a different mode from the next one."""
        return live.publish not in (None, self._swap.mode)

    async def warn_of_another_mode(self) -> None:
        """Warn once if another process now publishes in another mode."""
        before, self._other_mode = self._other_mode, await other_mode(self._store, "trainer", self._swap.mode)
        if self._other_mode not in (None, before):
            log.error("%s", self._other_mode)

    async def abandon_unfinished(self, why: str = "the trainer was stopped while publishing this version") -> None:
        """Mark half-published versions as failed, and remove their files."""
        for version in await self._store.versions.of_status("publishing"):
            await self._store.versions.failed(version.version, why)
            await self._remove(version)

    async def _forget_unfinished(self) -> None:
        """Undo an attempt to publish. The next attempt reuses the number, because staleness counts version numbers."""
        for version in await self._store.versions.of_status("publishing"):
            await self._store.versions.forget_unfinished(version.version)
            await self._delete(version)

    async def _delete(self, version: PolicyVersion) -> None:
        await asyncio.to_thread(shutil.rmtree, self._versions / f"v{version.version}", ignore_errors=True)

    async def _remove(self, version: PolicyVersion) -> None:
        """Delete the version's files, and unload its adapters from vLLM. The version can never be promoted again."""
        if self._swap.mode == "lora":
            with suppress(LightningError):  # a server that is away has unloaded it already
                await self._swap.unload(version)
        await self._store.versions.forget_files(version.version)
        await self._delete(version)

    async def prune(self, keep: Set[int]) -> None:
        """Remove versions, except the newest, live and candidate ones, those in `keep`, and adapters in use.

        Versions that never went live (`promotion.mode: gated`) do not count among the newest; the last of them is kept.
        """
        versions = await self._store.versions.with_files()
        passed_by = [v for v in versions if v.live_at is None and v.status in ("ready", "rejected")]
        newest = [v for v in versions if v not in passed_by][-self._config.keep_versions :]
        if self._swap.mode == "lora":
            keep = keep | await self._store.versions.pinned(time.time() - PINNED_S)
        for version in versions:
            in_use = version.version in keep or version.status in ("live", "candidate")
            if not in_use and version not in (*newest, *passed_by[-1:]):
                await self._remove(version)
