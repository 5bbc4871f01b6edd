"""The training loop. A step is: collect → step → commit → publish if the monitor allows → report."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, NotSaved, StoreUnavailable, TrainingUnavailable
from ..serving.swap import Superseded
from ..serving.vllm import AWAY
from ..store.training import Step
from .checkpoint import prune_checkpoints
from .collapse import LINE, Monitor
from .collect.collector import Collector
from .collect.groups import Order, Schedule
from .collect.sampled import AsChat, Sampled
from .plugins import NO_HOOKS, TrainerCore, TrainerHooks
from .publish import Publisher
from .report.metric_schema import scalars
from .types import Batch, Sample
from .waiting import GuideError, Stopped, all_of, in_thread, pause, until_done

log = logging.getLogger(__name__)

POLL_S = 0.1  # between two looks for complete groups
UNPUBLISHED = -1  # in place of a policy version: the trainer's weights were not published


def moved_nothing(metrics: Mapping[str, Any]) -> bool:
    """Return whether a step did not change the weights: it was skipped, or its learning rate was 0."""
    return bool(metrics.get("skipped")) or metrics.get("lr") == 0


class TrainingLoop:
    """Trains on the store's rollouts and publishes new weights. Killed at any moment, it resumes from the last step.

    Without a `publisher`, weights stay with the trainer. `order` sorts the groups; by default the longest waiting come
    first. `base` is the policy version that the trainer's weights build on, usually the live one. After a
    collapse it is UNPUBLISHED.
    """

    def __init__(
        self,
        core: TrainerCore,
        publisher: Publisher | None,
        hooks: TrainerHooks = NO_HOOKS,
        order: Order | None = None,
        as_chat: AsChat | None = None,
    ) -> None:
        config, self._config = core.config, core.config.trainer
        self._store, self._trainer, self._show, self._hooks = core.store, core.engine, core.run.show, hooks
        self._publisher = publisher
        sampled = Sampled(None if publisher is None else publisher.vllm, as_chat)
        settings, vocabulary = core.engine.settings, core.engine.vocabulary
        self.collector = Collector(settings, core.store, order, config.policy, vocabulary, sampled, hooks)
        self._schedule = Schedule(config.trainer.schedule, self.collector.waiting)
        self._monitor = Monitor(config.trainer, core.store)
        self._checkpoints = config.policy.directory.absolute() / "checkpoints"
        self._stop = asyncio.Event()
        self._waits = False  # at the last look: logged when a wait begins
        self._standstill: str | None = None
        self._fresh = True  # nothing has changed the trainer's weights yet
        self._free_since = time.perf_counter()
        self.base = 0
        self._at = 0  # the step after which the trainer has these weights

    async def run(self, stop: asyncio.Event, *, once: bool = False) -> None:
        """Train until `stop` is set, `trainer.max_steps` are done, or (with `once`) no step is possible now.

        While the store or the training engine is unavailable, wait; then continue as after a restart.
        """
        while not stop.is_set():
            try:
                await self.resume(stop)
                while not stop.is_set() and not await self.is_done():
                    await self.verify_live(idle=True)
                    await self._evaluate(stop)
                    if await self.is_stopped() or not await self._train_when_due(once):
                        if once:
                            break
                        await pause(stop, POLL_S)
                if not stop.is_set():
                    await self.verify_live()
                    await self._evaluate(stop)
                return
            except Stopped:
                log.warning("stopped while waiting: the next start continues from here")
            except (StoreUnavailable, TrainingUnavailable) as error:
                log.error("the trainer waits: %s", error)
            await pause(stop)

    async def _evaluate(self, stop: asyncio.Event) -> None:
        if self._hooks.evaluate is not None:
            await self._hooks.evaluate(stop, self.verify_live)

    async def _train_when_due(self, once: bool) -> bool:
        """Take a step if one is due; `once` ignores the schedule. Return False if there is nothing to do now."""
        publisher, waits_for = self._publisher, None
        if publisher is not None:
            await self.follow_live_version()
            if (late := await publisher.late(self.base)) is not None and late.step == self._at:
                await self._finish_publishing(publisher, late)
            waits_for = await publisher.waits_for(self.base)
        if waits_for is None and not once:
            waits_for = await self._schedule.waits_for()
        was_waiting, self._waits = self._waits, waits_for is not None
        if self._waits:
            if not was_waiting:
                log.info("the trainer waits for %s", waits_for)
            return False
        try:
            trained = await self.train_once(fewer=once or self._schedule.in_rounds, since=self._schedule.round)
        except AWAY as error:  # vLLM has a grammar that the step needs
            log.warning("the step waits: %s", error)
            await pause(self._stop)
            return True  # there is more to do, also with `once`
        why = None if trained else await self.collector.why_no_step()
        if why is not None and self._standstill is None:
            log.warning("no step was taken, though rollouts have waited for minutes: %s", why)
        self._standstill = why
        return trained

    # One step: collect, step, commit, publish, report ---------------------------------------------------------------

    async def train_once(self, *, fewer: bool = False, since: float | None = None) -> bool:
        """Take one step. Return False if too few rollouts are ready.

        `fewer` and `since` are as in `Collector.next_batch`. Raises Stopped if the trainer is stopped while the step
        waits, for example for disk space.
        """
        started = time.perf_counter()
        batch = await self.collector.next_batch(self.base, fewer=fewer, since=since)
        if batch is None:
            return False
        batch = replace(batch, version=await self._version_of_weights())
        metrics: dict[str, Any] = {"wait_s": started - self._free_since, "collect_s": time.perf_counter() - started}
        if self._hooks.guide is not None:
            guided = partial(self._hooks.guide, batch)
            batch = await until_done(f"step {batch.step} waits", guided, (GuideError,), self._stop)
        await self.conclude(batch, metrics | await self._step(batch))
        return True

    async def conclude(self, batch: Batch, metrics: dict[str, Any]) -> None:
        """Commit and report a step. Publish the weights unless the step left them unchanged or a collapse was seen."""
        await self._commit(batch.step, metrics)
        self._at = batch.step
        if metrics["skipped"]:
            log.error("step %d was skipped: %s; its rollouts are not used", batch.step, metrics["skipped_because"])
        elif "collapse" in metrics:
            self.base = UNPUBLISHED
        elif not moved_nothing(metrics):
            await self._publish(batch.step, batch.samples, metrics)
        await self._report(batch.step, metrics)
        self._free_since = time.perf_counter()

    async def _version_of_weights(self) -> int | None:
        """Return `base` if the trainer's weights are that version's; None if a step moved them and was not published.

        Without a publisher, it is None as well.
        """
        steps = await self._store.steps.newest(LINE)
        moved = next((s for s in steps if not moved_nothing(s.metrics) and "collapse" not in s.metrics), None)
        published = moved is None or moved.version is not None or moved.base != self.base
        return self.base if published and self._publisher is not None else None

    async def _step(self, batch: Batch) -> dict[str, Any]:
        """Take the optimizer step once the live version is verified. Return its metrics and the monitor's.

        Raises Stopped, or PublishError if the live version fails verification. In both cases, no weight has moved.
        """
        trainer, metrics = self._trainer, dict[str, Any](reward_by_task=batch.tasks)

        async def compute() -> None:
            await in_thread(trainer.forward_backward, batch)
            metrics["verify_s"] = time.perf_counter()  # only what verification takes beyond the passes

        await all_of([compute(), self.verify_live()])
        metrics["verify_s"] = time.perf_counter() - metrics["verify_s"]
        metrics |= await in_thread(trainer.optim_step)
        if metrics["skipped"]:
            metrics["skipped_because"] = trainer.skipped_because
        if left_out := "; ".join(filter(None, (batch.left_out, trainer.left_out_because))):
            metrics["left_out_because"] = left_out
            log.warning("step %d: %s", batch.step, left_out)
        for name, what in trainer.warnings.items():
            if what != metrics.get("skipped_because"):  # which is logged as an error
                log.warning("step %d (%s): %s", batch.step, name, what)
        signs = {} if self._publisher is None else await self._monitor.of_step(self.base, metrics)
        warnings = trainer.warnings | signs.get("warnings", {})
        return metrics | signs | ({"warnings": warnings} if warnings else {})

    async def _commit(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the checkpoint, then mark the step as trained. Raises Stopped if the trainer is stopped meanwhile."""
        checkpoint, started = self._checkpoints / str(step), time.perf_counter()

        async def save() -> None:
            await in_thread(self._trainer.save, checkpoint)
            metrics["checkpoint_s"] = time.perf_counter() - started
            await self._store.steps.trained(step, str(checkpoint), metrics)

        what = f"step {step} waits to be saved (if the disk is full, free some space)"
        await until_done(what, save, (NotSaved, StoreUnavailable), self._stop)
        await prune_checkpoints(self._store, self._config.keep_checkpoints)

    async def _publish(self, step: int, samples: Sequence[Sample], metrics: dict[str, Any]) -> None:
        """Make the trainer's weights live, unless another version was made live meanwhile.

        Raises Stopped if the trainer is stopped meanwhile. After a PublishError, the next start tries again.
        """
        publisher, started = self._publisher, time.perf_counter()
        if publisher is None:
            return
        try:
            metrics |= await publisher.publish(step, samples, scalars(metrics), self.base, self._stop)
            self.base = metrics.get("version", self.base)
            kept = await self._hooks.keep() if self._hooks.keep is not None else set()
            await publisher.prune(await self._monitor.keep() | kept)
        except Superseded as error:
            log.warning("step %d is not published: %s", step, error)
        metrics["publish_s"] = time.perf_counter() - started

    async def _report(self, step: int, metrics: dict[str, Any]) -> None:
        """Report a finished step to the trackers, the store and the screen."""
        metrics.setdefault("publish_s", 0.0)
        self._trainer.trackers.report(metrics)  # in this thread: MLflow and trackio know their run by thread or context
        await self._store.steps.update_metrics(step, metrics)
        if self._show is not None:
            self._show(step, metrics)

    # After a start --------------------------------------------------------------------------------------------------

    async def resume(self, stop: asyncio.Event | None = None) -> None:
        """Start or restart: release claimed rollouts, load the last checkpoint, and publish it if that was not done."""
        self._stop = stop or self._stop
        if released := await self._store.steps.release_unfinished():
            log.warning("step %s was not finished: its rollouts will be used again", released[0])
        if self._publisher is not None:
            await self._publisher.abandon_unfinished()
        last, untrained = await self._store.steps.last(), self._of_step(None)
        first = last is None and self._fresh  # a start before may have been configured otherwise
        if first or not untrained.is_dir():
            await in_thread(self._trainer.save, untrained)
        if last is not None:
            await self._take_over(last, last.base if last.version is None else last.version)
            log.info("resuming after step %d (policy version %d)", last.step, self.base)
        elif not self._fresh:
            await self._take_over(None, 0)
        self._fresh = False
        self._trainer.trackers.begin()
        log.info("learning rate %g: %s", self._trainer.rate.value, self._trainer.rate.reason)
        if last is not None and self._publisher is not None:
            await self._finish_publishing(self._publisher, last)

    async def _take_over(self, step: Step | None, base: int) -> None:
        """Load the weights after `step` (None: untrained), and remember the served ones for later verification."""
        publisher, live = self._publisher, await self._store.versions.live()
        checkpoint, served = self._of_step(step), None
        if not checkpoint.is_dir():
            raise ConfigError(f"checkpoint {checkpoint} is missing: restore it, or use a new store")
        if publisher is not None and not publisher.is_of_another_mode(live):
            of_live = await self._store.steps.of_version(live.version)
            if of_live is not None and not live.verified:  # the version before it may be the one that is served
                of_live = await self._store.steps.of_version(of_live.base)
            if (served := self._of_step(of_live)).is_dir():
                await in_thread(self._trainer.load, served)
                publisher.remember_served()
        if served != checkpoint:
            await in_thread(self._trainer.load, checkpoint)
        self.base, self._at = base, step.step if step else 0

    def _of_step(self, step: Step | None) -> Path:
        """The checkpoint of a step; for None, the one of the untrained weights."""
        return self._checkpoints / str(step.step if step else 0)

    async def _finish_publishing(self, publisher: Publisher, last: Step) -> None:
        """Publish and report the last step if that is not done yet, or if the publishing mode has changed."""
        live = await self._store.versions.live()
        if live.status == "failed":  # killed before the version before it was live again
            await publisher.take_back(live.version, last.base)
            live = await self._store.versions.live()
        stopped = await self._monitor.look() is not None
        last = await self._store.steps.last() or last  # the monitor may have written into its metrics
        if last.version is None and "collapse" in last.metrics:
            self.base = UNPUBLISHED
        metrics = dict(last.metrics)
        done = moved_nothing(metrics) or publisher.is_done(live, last)
        due = not stopped and (not done or publisher.is_of_another_mode(live))
        if due and await publisher.builds_on(self.base, live):
            samples = await self.collector.samples_of(await self._store.steps.rollouts_of(last.step))
            await self._publish(last.step, samples, metrics)
        if last.version is not None:
            metrics.setdefault("version", last.version)
        if "publish_s" not in last.metrics:
            await self._report(last.step, metrics)
        elif metrics != last.metrics:
            await self._store.steps.update_metrics(last.step, metrics)

    # What is live, and others may have changed ----------------------------------------------------------------------

    async def verify_live(self, *, idle: bool = False) -> Mapping[str, Any]:
        """Verify the live version if it is not verified yet. Return the verification's metrics, if there was one."""
        if self._publisher is None:
            return {}
        return await self._publisher.verify_live(self.base, self.collector.samples_of, self._stop, idle=idle)

    async def follow_live_version(self) -> None:
        """Continue from the live version if the trainer's weights do not build on it, as after a rollback."""
        publisher, live = self._publisher, await self._store.versions.live()
        assert publisher is not None, "without a publisher nothing is live"
        await publisher.warn_of_another_mode()
        if await publisher.builds_on(self.base, live):
            return
        log.warning("policy version %d is live: training continues from it", live.version)
        await self._take_over(await self._store.steps.of_version(live.version), live.version)
        log.info("learning rate %g: %s", self._trainer.rate.value, self._trainer.rate.reason)

    async def is_stopped(self) -> bool:
        """Return whether a collapse stops training. With `trainer.collapse.action: rollback`, go back if possible."""
        collapse = await self._monitor.look()
        if collapse is None:
            return False
        live = (await self._store.versions.live()).version
        goes_back = self._config.collapse.action == "rollback" and collapse.go_back_to < live
        if goes_back and self._publisher is not None:
            await self._publisher.take_back(live, collapse.go_back_to)
        return not goes_back

    async def is_done(self) -> bool:
        last = await self._store.steps.last()
        return self._config.max_steps is not None and last is not None and last.step >= self._config.max_steps
