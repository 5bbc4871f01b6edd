"""The training loop. A step is: collect → step → commit → publish if the monitor allows → report."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.config.root import Config
from ..core.errors import (
    ConfigError,
    LightningError,
    NotSaved,
    StoreUnavailable,
    TrainingUnavailable,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from ..serving.swap import Superseded
from ..store.store import Store
from ..store.training import Step
from .checkpoint import prune_checkpoints
from .collapse import LINE, Monitor
from .collect.collector import Collector
from .collect.groups import Order
from .collect.sampled import AsChat, Sampled
from .collect.schedule import Schedule
from .publish import NoPublisher, Publisher
from .rate import warn_of_rate
from .report.metric_schema import scalars
from .step.engine import TrainingEngine
from .types import AskJudge, Batch, Guide, Sample, Show, Sift, show_nothing
from .waiting import GuideError, JudgeError, Stopped, all_of, before_retry, in_thread, pause

log = logging.getLogger(__name__)

UNPUBLISHED = -1  # in place of a policy version: the trainer's weights were not published


def moved_nothing(metrics: Mapping[str, Any]) -> bool:
    """Return whether a step left the weights as they were: it was skipped, or its learning rate is 0 (warm-up)."""
    return bool(metrics.get("skipped")) or metrics.get("lr") == 0


async def _end_of(work: Awaitable[Any]) -> float:
    """When it has ended, by the performance counter."""
    await work
    return time.perf_counter()


class TrainingLoop:
    """Trains on the store's rollouts and publishes every step. Killed at any moment, it resumes from the last step.

    `order` sorts the groups; by default the longest waiting come first. `base` is the number of the policy version that
    the trainer's weights build on; `live` is everywhere the version that answers agents, usually the same.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        trainer: TrainingEngine,
        publisher: NoPublisher,
        order: Order | None = None,
        show: Show = show_nothing,
        judge: AskJudge | None = None,
        guide: Guide | None = None,
        sift: Sift | None = None,
        as_chat: AsChat | None = None,
    ) -> None:
        self._config = config.trainer
        self._store = store
        self._trainer = trainer
        self._publisher = publisher
        self._guide = guide
        fitting = config.trainer.model_copy(update={"max_sample_tokens": trainer.max_tokens})
        sampled = Sampled(publisher.vllm, as_chat)
        self.collector = Collector(
            fitting, store, order, config.policy, trainer.vocabulary, judge, sampled, guide, sift
        )
        self._schedule = Schedule(config.trainer.schedule, self.collector, store)
        self._monitor = Monitor(config.trainer, store)
        self._checkpoints = config.policy.directory.absolute() / "checkpoints"
        self._show = show
        self._stop = asyncio.Event()
        self._waited_for: str | None = None  # at the last look: logged when a wait begins
        self._standstill_logged = False
        self._other_weights: str | None = None
        self._fresh = True  # nothing has changed the trainer's weights yet
        self._weights_are_base = True  # the trainer's weights are those of version `base`
        self._free_since = time.perf_counter()
        self.base = 0

    async def run(self, stop: asyncio.Event, *, once: bool = False) -> None:
        """Train until `stop` is set, `trainer.max_steps` are done, or (with `once`) no complete group is left.

        If the store cannot be written, or the training engine is away, wait for it and continue as after a restart.
        """
        while not stop.is_set():
            try:
                await self.resume(stop)
                await self._train(stop, once)
                return
            except (StoreUnavailable, TrainingUnavailable) as error:
                log.error("the trainer waits: %s", error)
            await pause(stop)

    async def _train(self, stop: asyncio.Event, once: bool) -> None:
        while not stop.is_set() and not await self.is_done():
            trained = False
            await self.verify_live(idle=True)
            if not await self.is_stopped():
                await self.follow_live_version()
                await self._publisher.attend(self.collector.samples_of, self._stop)
                trained = await self._train_when_due(once)
            if not trained and once:
                break
            if not trained:
                await pause(stop, self._config.poll_s)
        if not stop.is_set():
            await self.verify_live()

    async def verify_live(self, *, idle: bool = False) -> Mapping[str, Any]:
        """Have the live version verified, if it is not yet. Return the metrics about it; none if stopped before."""
        try:
            return await self._publisher.verify_live(self.base, self.collector.samples_of, self._stop, idle=idle)
        except Stopped:
            log.warning("stopped before the live version was verified: the next start does it")
            return {}

    async def _train_when_due(self, once: bool) -> bool:
        """Take a step if the schedule and the rollouts allow one now. `once` asks no schedule."""
        waits_for = await self._publisher.waits_for(self.base)
        if waits_for is None and not once:
            waits_for = await self._schedule.waits_for()
        if waits_for is not None and self._waited_for is None:
            log.info("the trainer waits for %s", waits_for)
        self._waited_for = waits_for
        if waits_for is not None:
            return False
        try:
            trained = await self.train_once(fewer=once or self._schedule.in_rounds, since=self._schedule.round)
        except (JudgeError, UpstreamUnreachable, UpstreamTimeout) as error:
            await self.pause_after(error)
            return True  # there is more to do, also with `once`
        self._report_standstill(None if trained else await self.collector.why_no_step())
        return trained

    def _report_standstill(self, why: str | None) -> None:
        if why is not None and not self._standstill_logged:
            log.warning("no step, though rollouts have waited for minutes: %s", why)
        self._standstill_logged = why is not None

    async def pause_after(self, error: LightningError) -> None:
        """Wait before the next batch is tried: for a judge, or for a vLLM that knows a grammar."""
        log.warning("the step waits: %s", error)
        await pause(self._stop)

    # One step ------------------------------------------------------------------------------------------------------

    async def train_once(self, *, fewer: bool = False, since: float | None = None) -> bool:
        """Take one step. Return False if too few rollouts are ready, or if the trainer is stopped before its end.

        `fewer`, `since` and JudgeError are those of `Collector.next_batch`.
        """
        started = time.perf_counter()
        batch = await self.collector.next_batch(self.base, fewer=fewer, since=since)
        if batch is None:
            return False
        if self._weights_are_base and self._publisher.publishes:
            batch = replace(batch, version=self.base)
        metrics: dict[str, Any] = {"wait_s": started - self._free_since, "collect_s": time.perf_counter() - started}
        try:
            metrics |= await self._step(await self._guided(batch))
        except Stopped:
            log.warning("stopped before step %d was taken: the next start offers its rollouts again", batch.step)
            return False
        return await self.conclude(batch, metrics)

    async def _guided(self, batch: Batch) -> Batch:
        """The batch with the guide's scores. Waits while the guide is away; raises Stopped."""
        while self._guide is not None:
            try:
                return await self._guide.guided(batch)
            except GuideError as error:
                log.warning("step %d waits: %s", batch.step, error)
            await before_retry(self._stop)
        return batch

    async def conclude(self, batch: Batch, metrics: dict[str, Any]) -> bool:
        """Commit, publish and report a step with the trainer's present weights. Return False if stopped before."""
        try:
            await self._commit(batch.step, metrics)
            self._weights_are_base &= moved_nothing(metrics)
            if "collapse" in metrics and not metrics["skipped"]:
                self.base = UNPUBLISHED
            if self._may_publish(batch.step, metrics):
                await self._publish(batch.step, batch.samples, metrics)
        except Stopped:
            log.warning("stopped before step %d was saved or published: the next start finishes it", batch.step)
            return False
        await self._report(batch.step, metrics)
        self._free_since = time.perf_counter()
        return True

    async def _step(self, batch: Batch) -> dict[str, Any]:
        """Take the optimizer step, once the live version is verified; return its metrics, and the monitor's.

        Raises Stopped, or the PublishError of a version that does not verify: then no weight has moved.
        """
        gradients = in_thread(self._trainer.forward_backward, batch)
        verification = self._publisher.verify_live(self.base, self.collector.samples_of, self._stop)
        computed, verified = await all_of(map(_end_of, (gradients, verification)))
        metrics: dict[str, Any] = {**await in_thread(self._trainer.optim_step), "reward_by_task": batch.tasks}
        metrics["verify_s"] = max(0.0, verified - computed)
        if metrics["skipped"]:
            metrics["skipped_because"] = self._trainer.skipped_because
        left_out = "; ".join(filter(None, (batch.left_out, self._trainer.left_out_because)))
        if left_out:
            metrics["left_out_because"] = left_out
            log.warning("step %d: %s", batch.step, left_out)
        signs = await self._monitor.of_step(self.base, metrics) if self._publisher.publishes else {}
        for name, what in self._trainer.warnings.items():
            if what != metrics.get("skipped_because"):  # which is logged as an error
                log.warning("step %d: %s: %s", batch.step, name, what)
        if warnings := {**self._trainer.warnings, **signs.get("warnings", {})}:
            signs["warnings"] = warnings
        return metrics | signs

    async def _commit(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the checkpoint. Once it is complete on disk, one row makes the step count. Raises Stopped."""
        checkpoint, started = self._checkpoints / str(step), time.perf_counter()
        while True:
            try:
                await in_thread(self._trainer.save, checkpoint)
                metrics["checkpoint_s"] = time.perf_counter() - started
                await self._store.steps.trained(step, str(checkpoint), metrics)
                break
            except (NotSaved, StoreUnavailable) as error:
                log.error("step %d waits to be saved: %s; free some space, it is tried again", step, error)
            await before_retry(self._stop)
        await prune_checkpoints(self._store, self._config.keep_checkpoints)

    def _may_publish(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether to publish: not if the weights are the old ones, nor if the monitor sees a collapse."""
        if metrics["skipped"]:
            log.error("step %d was skipped: %s; its rollouts are not used", step, metrics["skipped_because"])
        due = self._publisher.is_due(step, metrics)
        return due and not moved_nothing(metrics) and "collapse" not in metrics

    async def _publish(self, step: int, samples: Sequence[Sample], metrics: dict[str, Any]) -> None:
        """Make the trainer's weights live, unless another version was made live meanwhile. Raises Stopped.

        PublishError ends the trainer. The step is committed, so the next start publishes it again.
        """
        assert isinstance(self._publisher, Publisher), "nothing is due without one"
        started = time.perf_counter()
        try:
            published = await self._publisher.publish(step, samples, scalars(metrics), self.base, self._stop)
            metrics["version"] = self.base = published.version
            self._weights_are_base = True
            metrics |= self._publisher.measured
            kept = await self._monitor.keep() | await self._publisher.background.keep()
            await self._publisher.files.prune(kept)
        except Superseded as error:
            log.warning("step %d is not published: %s", step, error)
        metrics["publish_s"] = time.perf_counter() - started

    async def _report(self, step: int, metrics: dict[str, Any]) -> None:
        """Report a finished step to the trackers, the store and the screen."""
        metrics.setdefault("publish_s", 0.0)
        self._trainer.trackers.report(metrics)  # in this thread: MLflow and trackio know their run by thread or context
        await self._store.steps.update_metrics(step, metrics)
        self._show(step, metrics)

    # After a start, and after a version was made live by hand ---------------------------------------------------------

    async def resume(self, stop: asyncio.Event | None = None) -> None:
        """Clean up after a killed trainer: give back claimed rollouts, load the last checkpoint, publish if need be."""
        self._stop = stop or self._stop
        last = await self._restore()
        self._trainer.trackers.begin()  # they keep the learning rate
        self._log_rate()
        if self._config.learning_rate != "auto":
            warn_of_rate(self._config, self._trainer.rate.value)
        if last is not None and isinstance(self._publisher, Publisher):
            await self._finish_publishing(self._publisher, last)

    def _log_rate(self) -> None:
        rate = self._trainer.rate
        log.info("learning rate %g: %s", rate.value, rate.reason)

    async def _restore(self) -> Step | None:
        """Load the checkpoint of the last step and return the step; None if there was none."""
        if released := await self._store.steps.release_unfinished():
            log.warning("step %s was not finished: its rollouts are offered again", released[0])
        await self._publisher.abandon_unfinished()
        if not (self._checkpoints / "0").is_dir():
            await in_thread(self._trainer.save, self._checkpoints / "0")
        last = await self._store.steps.last()
        if last is None:
            if not self._fresh:
                await in_thread(self._trainer.load, self._checkpoints / "0")
                self.base = 0
            self._fresh, self._weights_are_base = False, True
            return None
        if last.checkpoint is None or not Path(last.checkpoint).is_dir():
            raise ConfigError(
                f"the checkpoint of step {last.step} is gone: {last.checkpoint}; use a new store, or restore it"
            )
        if await self._load_served() != last.checkpoint:
            await in_thread(self._trainer.load, Path(last.checkpoint))
        self.base = last.base if last.version is None else last.version
        log.info("resuming after step %d (policy version %d)", last.step, self.base)
        if last.version is None and "collapse" in last.metrics:
            self.base = UNPUBLISHED
        moved = next((s for s in await self._store.steps.newest(LINE) if not moved_nothing(s.metrics)), None)
        self._weights_are_base = moved is None or moved.version is not None or moved.base != self.base
        return last

    async def _load_served(self) -> str | None:
        """Load the live version's weights, as those that are served. Return their checkpoint; None if it is gone."""
        live = await self._store.versions.live()
        if not self._publisher.publishes or self._publisher.is_of_another_mode(live):
            return None
        step = await self._store.steps.of_version(live.version)
        if step is not None and not live.verified:  # the version before it may be the one that is served
            step = await self._store.steps.of_version(step.base)
        checkpoint = str(self._checkpoints / "0") if step is None else step.checkpoint
        if checkpoint is None or not Path(checkpoint).is_dir():
            return None
        await in_thread(self._trainer.load, Path(checkpoint))
        self._publisher.remember_served()
        return checkpoint

    async def _finish_publishing(self, publisher: Publisher, last: Step) -> None:
        """Publish and report the last step, if the trainer was killed before it did."""
        live = await self._store.versions.live()
        if live.status == "failed":  # killed before the version before it was live again
            await publisher.take_back(live.version, last.base)
            live = await self._store.versions.live()
        stopped = await self._monitor.look() is not None
        last = await self._store.steps.last() or last  # the monitor may have written into its metrics
        if stopped and last.version is None:
            self.base = UNPUBLISHED
        done = moved_nothing(last.metrics) or publisher.is_done(live, last)
        builds_on = await publisher.builds_on(self.base, live)
        if not stopped and builds_on and (not done or publisher.is_of_another_mode(live)):
            await self._publish_again(last)
        elif "publish_s" not in last.metrics:  # killed after it was published, or skipped
            published = {} if last.version is None else {"version": last.version}
            await self._report(last.step, last.metrics | published)

    async def _publish_again(self, last: Step) -> None:
        """Publish a committed step. It is reported unless it was before: `policy.publish` was changed, say."""
        metrics, reported = dict(last.metrics), "publish_s" in last.metrics
        samples = await self.collector.samples_of(await self._store.steps.rollouts_of(last.step))
        try:
            await self._publish(last.step, samples, metrics)
        except Stopped:
            log.warning("stopped before step %d was published: the next start does it", last.step)
            return
        if reported:
            await self._store.steps.update_metrics(last.step, metrics)
        else:
            await self._report(last.step, metrics)

    async def follow_live_version(self) -> None:
        """After a promotion or rollback by hand, train on from that version."""
        await self._publisher.warn_of_another_mode()
        live = await self._store.versions.live()
        if live.version == self.base or await self._publisher.builds_on(self.base, live):
            await self._warn_of_other_weights()
            return
        step = await self._store.steps.of_version(live.version)
        checkpoint = self._checkpoints / str(step.step if step else 0)
        if not checkpoint.is_dir():
            raise ConfigError(f"policy version {live.version} is live, but its checkpoint {checkpoint} is gone")
        log.warning("policy version %d is live: training continues from it", live.version)
        before = self._trainer.rate
        await in_thread(self._trainer.load, checkpoint)
        if self._trainer.rate != before:
            self._log_rate()
        self.base, self._weights_are_base = live.version, True
        if not self._publisher.is_of_another_mode(live):
            if live.verified:  # else it is told from the one before
                self._publisher.remember_served()
        elif step is not None:
            await self._publish_again(step)

    async def _warn_of_other_weights(self) -> None:
        """Log once that the proxy found the policy's server not answering as the live version did."""
        problem = await self._store.versions.problem(self.base)
        if problem is not None and problem != self._other_weights:
            log.error("rollouts come from other weights: %s", problem)
        self._other_weights = problem

    async def is_stopped(self) -> bool:
        """Return whether a collapse stops publication. With `collapse.action: rollback`, go back first."""
        collapse = await self._monitor.look()
        if collapse is None:
            return False
        live = (await self._store.versions.live()).version
        if self._config.collapse.action != "rollback" or collapse.go_back_to >= live:
            return True
        await self._publisher.take_back(live, collapse.go_back_to)
        return False

    async def is_done(self) -> bool:
        """Return whether `trainer.max_steps` are done."""
        last = await self._store.steps.last()
        return self._config.max_steps is not None and last is not None and last.step >= self._config.max_steps
