"""The trainer's day: collect, step, commit, publish. Every commit point is in `TrainingLoop.train_once`."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..proxy.config.root import Config
from ..proxy.errors import ConfigError, NotSaved, StoreUnavailable, UpstreamTimeout, UpstreamUnreachable
from ..proxy.policy.mode import publish_mode
from ..proxy.policy.swap import Superseded, Swap
from ..proxy.policy.vllm import VllmFault, VllmFleet, operator_session
from ..proxy.store.database import opened
from ..proxy.store.store import Store
from ..proxy.store.training import Step
from ..proxy.types import PolicyVersion
from .collapse.monitor import Monitor
from .collect.collector import Collector, Order
from .collect.schedule import Schedule
from .judge.judge import JudgeError
from .offline.data import check_store
from .publish import Publisher
from .report.metric_schema import scalars
from .step.trainer import LightningTrainer
from .types import Batch, Sample

log = logging.getLogger(__name__)

RETRY_S = 2.0
FAULTS = 10
UNPUBLISHED = -1  # instead of a policy version: the trainer's weights are none's
# Called when a step is done, with its number and metrics (`metric_schema`).
Show = Callable[[int, Mapping[str, Any]], None]


def show_nothing(step: int, metrics: Mapping[str, Any]) -> None: ...


class Stopped(Exception):
    """The trainer was told to end while it waited."""


class TrainingLoop:
    """Trains on what the store holds and publishes every step. Killed at any moment, it goes on from the last step.

    `publisher` None: no step is published. `order`: in which groups are taken; by default the longest waiting first.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        trainer: LightningTrainer,
        publisher: Publisher | None,
        order: Order | None = None,
        show: Show = show_nothing,
    ) -> None:
        self._config = config.trainer
        self._store = store
        self._trainer = trainer
        self._publisher = publisher
        fitting = config.trainer.model_copy(update={"max_sample_tokens": trainer.max_tokens})
        self._collector = Collector(fitting, store, order, config.policy, trainer.vocabulary)
        self._schedule = Schedule(config.trainer.schedule, self._collector, store)
        self._waits_for: str | None = None
        self._monitor = Monitor(config.trainer, store)
        if publisher is not None:
            publisher.keep = self._monitor.keep
        self._checkpoints = config.policy.directory.absolute() / "checkpoints"
        self._show = show
        self._stop = asyncio.Event()
        self._fresh = True  # nothing has moved the trainer's weights yet
        self._version = 0  # the policy version that the trainer's weights go on from
        self._free_since = time.perf_counter()

    async def run(self, stop: asyncio.Event, *, once: bool = False) -> None:
        """Train until `stop` is set, `trainer.max_steps` are done, or (with `once`) no whole group is left.

        A store that cannot be written is waited for; then it is as after a restart.
        """
        while not stop.is_set():
            try:
                await self.resume(stop)
                await self._train(stop, once)
                return
            except StoreUnavailable as error:
                log.error("the trainer waits: %s", error)
            await pause(stop, RETRY_S)

    async def _train(self, stop: asyncio.Event, once: bool) -> None:
        while not stop.is_set() and not await self.is_done():
            trained = False
            if not await self.is_stopped():
                await self.follow_live_version()
                trained = await self._train_when_due(once)
            if not trained and once:
                break
            if not trained:
                await pause(stop, self._config.poll_s)

    async def resume(self, stop: asyncio.Event | None = None) -> None:
        """Clean up after a killed trainer: give back claimed rollouts, load the last checkpoint, publish if need be."""
        self._stop = stop or self._stop
        self._trainer.begin()
        last = await self._restore()
        if last is not None and self._publisher is not None:
            await self._finish_publishing(self._publisher, last)

    async def _restore(self) -> Step | None:
        """Go on from the last step; None if there was none."""
        if released := await self._store.steps.release_unfinished():
            log.warning("step %s was not finished: its rollouts are offered again", released[0])
        if self._publisher is not None:
            await self._publisher.abandon_unfinished()
        if not (self._checkpoints / "0").is_dir():
            await asyncio.to_thread(self._trainer.save, self._checkpoints / "0")
        last = await self._store.steps.last()
        if last is None:
            if not self._fresh:
                await asyncio.to_thread(self._trainer.load, self._checkpoints / "0")
                self._version = 0
            self._fresh = False
            return None
        if last.checkpoint is None or not Path(last.checkpoint).is_dir():
            raise ConfigError(
                f"the checkpoint of step {last.step} is gone: {last.checkpoint}; use a new store, or restore it"
            )
        await asyncio.to_thread(self._trainer.load, Path(last.checkpoint))
        self._version = last.base if last.version is None else last.version
        log.info("going on after step %d (policy version %d)", last.step, self._version)
        if last.version is None and "collapse" in last.metrics:
            self._version = UNPUBLISHED
        return last

    async def _finish_publishing(self, publisher: Publisher, last: Step) -> None:
        live = await self._store.versions.live()
        if live.status == "failed":  # killed before the version before it was live again
            await publisher.take_back(live.version, last.base)
            live = await self._store.versions.live()
        stopped = await self._monitor.look() is not None
        last = await self._store.steps.last() or last  # what was seen is in its metrics
        if stopped and last.version is None:
            self._version = UNPUBLISHED
        done = last.metrics.get("skipped") or publisher.is_done(live, last)
        if not stopped and live.version == self._version and (not done or publisher.is_of_another_mode(live)):
            await self._publish(last.step, await self._samples_of_step(last.step), last.metrics)
        elif "publish_s" not in last.metrics:  # killed after it was published, or skipped
            published = {} if last.version is None else {"version": last.version}
            await self._finish(last.step, last.metrics | published)

    async def _train_when_due(self, once: bool) -> bool:
        """A step, if the schedule and the rollouts allow one now; `once` asks no schedule."""
        waits_for = None if once else await self._schedule.waits_for()
        if waits_for is not None and self._waits_for is None:
            log.info("the trainer waits for %s", waits_for)
        self._waits_for = waits_for
        if waits_for is not None:
            return False
        try:
            return await self.train_once(fewer=once or self._schedule.in_rounds, since=self._schedule.round)
        except JudgeError as error:
            await self.wait_for_judge(error)
            return True  # not over yet, also with `once`

    async def wait_for_judge(self, error: JudgeError) -> None:
        """Before the step is tried again; what the judge said until now is not asked for again."""
        log.warning("the step waits: %s", error)
        await pause(self._stop, RETRY_S)

    async def train_once(self, *, fewer: bool = False, since: float | None = None) -> bool:
        """One step, if enough rollouts are ready: claim → optimizer step → checkpoint → commit → publish.

        `fewer`, `since`, JudgeError: as in `Collector.next_batch`.
        """
        started = time.perf_counter()
        batch = await self._collector.next_batch(self._version, fewer=fewer, since=since)
        if batch is None:
            return False
        metrics: dict[str, Any] = {"wait_s": started - self._free_since, "collect_s": time.perf_counter() - started}
        metrics |= await asyncio.to_thread(self._trainer.step, batch)
        metrics |= {"skipped_because": self._trainer.skipped_because} if metrics["skipped"] else {}
        metrics["reward_by_task"] = batch.tasks
        if self._publisher is not None:
            metrics |= await self._monitor.of_step(self._version, metrics)
        return await self.conclude(batch, metrics)

    async def conclude(self, batch: Batch, metrics: dict[str, Any]) -> bool:
        """Commit and publish the weights as they are after a step; False if it was stopped before it was saved."""
        try:
            await self._commit(batch, metrics)
        except Stopped:
            log.warning("stopped before step %d was saved: its rollouts are offered again", batch.step)
            return False
        if metrics["skipped"]:
            log.error("step %d was skipped: %s; its rollouts are not used", batch.step, metrics["skipped_because"])
            await self._finish(batch.step, metrics)
        elif "collapse" in metrics:
            self._version = UNPUBLISHED
            await self._finish(batch.step, metrics)
        else:
            await self._publish(batch.step, batch.samples, metrics)
        self._free_since = time.perf_counter()
        return True

    async def _commit(self, batch: Batch, metrics: dict[str, Any]) -> None:
        """Once the checkpoint is whole on disk, one row makes the step count."""
        checkpoint, started = self._checkpoints / str(batch.step), time.perf_counter()
        while True:
            try:
                await asyncio.to_thread(self._trainer.save, checkpoint)
                metrics["checkpoint_s"] = time.perf_counter() - started
                await self._store.steps.trained(batch.step, str(checkpoint), metrics)
                break
            except (NotSaved, StoreUnavailable) as error:
                log.error("step %d waits to be saved: %s; free some space, it is tried again", batch.step, error)
            await pause(self._stop, RETRY_S)
            if self._stop.is_set():
                raise Stopped
        await self._prune_checkpoints()

    async def _publish(self, step: int, samples: Sequence[Sample], metrics: dict[str, Any]) -> None:
        if self._publisher is None:
            await self._finish(step, metrics)
            return
        started = time.perf_counter()
        self._publisher.stop = self._stop
        try:
            metrics["version"] = self._version = (await self._reach(self._publisher, step, samples, metrics)).version
        except Superseded as error:
            log.warning("step %d is not published: %s", step, error)
        except Stopped:
            log.warning("stopped before step %d was published: the next start does it", step)
            return
        again, metrics["publish_s"] = "publish_s" in metrics, time.perf_counter() - started
        if again:  # in another way, or after it was made live by hand: the trackers know this step
            await self._store.steps.update_metrics(step, metrics)
        else:
            await self._finish(step, metrics)

    async def _finish(self, step: int, metrics: dict[str, Any]) -> None:
        """All is known of a step: to the trackers, the store, the screen; once, unless killed in the middle of it."""
        metrics.setdefault("publish_s", 0.0)
        self._trainer.report(metrics)  # in this thread: MLflow and trackio know their run by thread or context
        await self._store.steps.update_metrics(step, metrics)
        self._show(step, metrics)

    async def _reach(
        self, publisher: Publisher, step: int, samples: Sequence[Sample], metrics: dict[str, Any]
    ) -> PolicyVersion:
        """Publish, however long vLLM is away; Stopped if we are to end meanwhile.

        VllmFault if vLLM is there all the time and meets an error of its own `FAULTS` times; the version is abandoned.
        """
        faults = 0
        while True:
            try:
                return await publisher.publish(step, samples, scalars(metrics), self._version)
            except (UpstreamUnreachable, UpstreamTimeout, NotSaved) as error:
                faults = faults if isinstance(error, NotSaved) else 0
                log.warning("publishing step %d waits: %s", step, error)
            except VllmFault as error:
                faults += 1
                if faults == FAULTS:
                    await publisher.abandon_unfinished(error.message)
                    raise
                log.warning("publishing step %d is tried again (%d of %d): %s", step, faults, FAULTS - 1, error)
            await pause(self._stop, RETRY_S)
            if self._stop.is_set():
                raise Stopped
            await publisher.forget_unfinished()

    async def is_stopped(self) -> bool:
        """Whether a collapse was seen, and neither somebody nor (`collapse.action: rollback`) we went back since."""
        collapse = None if self._publisher is None else await self._monitor.look()
        if collapse is None or self._publisher is None:
            return False
        live = (await self._store.versions.live()).version
        if self._config.collapse.action != "rollback" or collapse.go_back_to >= live:
            return True
        await self._publisher.take_back(live, collapse.go_back_to)
        return False

    @property
    def version(self) -> int:
        """The policy version that the trainer's weights go on from."""
        return self._version

    async def follow_live_version(self) -> None:
        """After a promotion or rollback by hand, train on from that version."""
        live = await self._store.versions.live()
        if live.version == self._version:
            return
        step = await self._store.steps.of_version(live.version)
        checkpoint = self._checkpoints / str(step.step if step else 0)
        if not checkpoint.is_dir():
            raise ConfigError(f"policy version {live.version} is live, but its checkpoint {checkpoint} is gone")
        log.warning("policy version %d was made live: training goes on from it", live.version)
        await asyncio.to_thread(self._trainer.load, checkpoint)
        self._version = live.version
        if step is not None and self._publisher and self._publisher.is_of_another_mode(live):
            await self._publish(step.step, await self._samples_of_step(step.step), step.metrics)

    async def _samples_of_step(self, step: int) -> list[Sample]:
        return await self._collector.samples_of(await self._store.steps.rollouts_of(step))

    async def is_done(self) -> bool:
        last = await self._store.steps.last()
        return self._config.max_steps is not None and last is not None and last.step >= self._config.max_steps

    async def _prune_checkpoints(self) -> None:
        """Keep the newest, and those that a policy version with files can be trained on from."""
        steps = [s for s in await self._store.steps.all() if s.checkpoint is not None]
        servable = {v.version for v in await self._store.versions.all() if v.path is not None}
        for step in steps[: -self._config.keep_checkpoints]:
            if step.version not in servable:
                await asyncio.to_thread(shutil.rmtree, str(step.checkpoint), ignore_errors=True)
                await self._store.steps.forget_checkpoint(step.step)


def follow(config: Config) -> None:
    """What every rank but the first does, whatever that one trains on."""
    trainer = LightningTrainer(config.trainer, config.policy)
    trainer.ranks.follow(trainer)


async def train(
    config: Config,
    stop: asyncio.Event,
    *,
    once: bool = False,
    show: Show = show_nothing,
    runs: Callable[..., Any] = TrainingLoop,
) -> None:
    """Run the trainer on the configuration's store and vLLM server until `stop` is set; `show` every step.

    `runs`: the method, `TrainingLoop` or another that is made and run as that is.
    """
    upstream = next((u for u in config.upstreams if u.kind == "vllm"), None)
    if upstream is None:
        raise ConfigError("upstreams: the trainer needs one of kind vllm")
    mode = publish_mode(config)
    check_store(config)
    with only_trainer(config.policy.directory):
        trainer = await asyncio.to_thread(LightningTrainer, config.trainer, config.policy)
        try:
            async with opened(config.store) as database, operator_session() as session:
                store = Store(database)
                vllm = VllmFleet(session, upstream.urls, upstream.credentials)
                swap = Swap(store, vllm, mode, config.policy.directory)
                publisher = Publisher(config.policy, store, swap, trainer)
                await runs(config, store, trainer, publisher, show=show).run(stop, once=once)
            trainer.ranks.end()
        finally:
            trainer.close()


@contextmanager
def only_trainer(directory: Path) -> Iterator[None]:
    """Two trainers on one policy would overwrite each other's checkpoints; the lock goes with the process."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "trainer.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another trainer works on {directory}; stop it first") from None
        yield


async def pause(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
