"""`train --offline`: trains on recorded rollouts, without vLLM and without a proxy."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shlex
from pathlib import Path

from ...core.config.root import Config
from ...core.errors import ConfigError
from ...core.groups import Group
from ...serving.mode import publish_mode
from ...store.opening import opened
from ...store.store import Store
from ...store.training import Step
from ...trainer.lock import only_trainer
from ...trainer.loop import TrainingLoop
from ...trainer.plugins import Offline, Run, TrainerCore, TrainerHooks, open_plugins, plugins_of
from ...trainer.step.engine import TrainingEngine
from ...trainer.train import open_engine
from . import data

log = logging.getLogger(__name__)

NEVER_STALE = 2**31
EPOCHS_DONE = "epochs_done"  # a metric of an epoch's last step


class OfflineRun:
    """Makes passes over the data, each in a different order. A killed run resumes after its last step in the store."""

    def __init__(self, core: TrainerCore, hooks: TrainerHooks, epochs: int) -> None:
        self._config = core.config.trainer
        self._store = core.store
        self._epochs = epochs
        self._done = 0  # epochs
        self._loop = TrainingLoop(core, None, hooks, self._order)

    async def run(self, stop: asyncio.Event) -> Step | None:
        """Train until all epochs or `trainer.max_steps` are done, or `stop` is set. Return the last step, if any."""
        steps = await self._store.steps.all()
        self._done = max((int(s.metrics.get(EPOCHS_DONE, 0)) for s in steps), default=0)
        # An earlier run ended with its last epoch, and `epochs` is higher now. Fine-tuning since began no other.
        own = [step for step in steps if EPOCHS_DONE in step.metrics or "method" not in step.metrics]
        if own and own[-1].metrics.get(EPOCHS_DONE) == self._done < self._epochs:
            await self._store.steps.end_epoch(own[-1].step, own[-1].metrics, True)
        while self._done < self._epochs:
            await self._loop.run(stop, once=True)
            if stop.is_set() or await self._loop.is_done() or not await self._end_epoch():
                break
        return await self._store.steps.last()

    async def _end_epoch(self) -> bool:
        """Record that an epoch is done. Return False, without a record, if nothing in it could be learned from."""
        last = await self._store.steps.last()
        if last is None or not await self._store.steps.took_any():
            log.warning("nothing in the data can be learned from: the field `dropped` of each rollout says why")
            lone = await self._store.waiting.lone(self._config.failed_reward is not None)
            if lone is not None and not self._config.takes_lone_rollouts:
                log.warning("%d rollouts have no task: see trainer.lone_rollouts", lone.rewarded)
            return False
        self._done += 1
        metrics = last.metrics | {EPOCHS_DONE: self._done}
        await self._store.steps.end_epoch(last.step, metrics, self._done < self._epochs)
        log.info("epoch %d of %d is done after step %d", self._done, self._epochs, last.step)
        return True

    def _order(self, group: Group) -> bytes:
        """A sort key that looks random. It is the same in every process, and for a store and its export."""
        return hashlib.sha256(f"{self._config.seed} {self._done} {group.task_id} {group.after}".encode()).digest()


async def train_offline(config: Config, run: Run, offline: Offline, stop: asyncio.Event) -> None:
    """Train on recorded data, which is only read, and write the weights as files."""
    if offline.data is None and config.store.is_postgres:
        raise ConfigError(
            "train --offline needs a store in a file: make one with `lightning-proxy store migrate postgresql://… "
            "sqlite:///copy.db`, and name it with --data copy.db"
        )
    directory = (offline.directory or config.policy.directory / "offline").expanduser().absolute()
    with only_trainer(directory, directory / data.STORE_FILE):
        store = await data.prepare(offline.data or config.store.path, directory)
        # Rollouts of any age, and no wait for siblings.
        trainer = config.trainer.model_copy(update={"max_staleness": NEVER_STALE, "group_timeout_s": 0.0})
        policy = config.policy.model_copy(update={"directory": directory})
        config = config.model_copy(update={"trainer": trainer, "policy": policy, "store": store})
        plugins = plugins_of(config)
        async with open_engine(config, plugins) as engine:
            async with opened(store) as database:
                core = TrainerCore(config, Store(database), engine, run)
                async with open_plugins(plugins, core) as hooks:
                    if hooks.tune is not None:
                        last = await hooks.tune(None, stop, hooks)
                    else:
                        last = await OfflineRun(core, hooks, offline.epochs).run(stop)
            if last is not None:
                if stop.is_set():  # the trainer's own weights may be on their way to the next step
                    await asyncio.to_thread(engine.load, Path(str(last.checkpoint)))
                await asyncio.to_thread(save_weights, config, engine, last.step)


def save_weights(config: Config, trainer: TrainingEngine, step: int) -> None:
    directory, alias, base = config.policy.directory, config.policy.alias, shlex.quote(str(config.policy.model))
    full, model, adapter = config.trainer.weights == "full", directory / "model", directory / "adapter"
    if not config.policy.adapters and publish_mode(config) == "merged":
        trainer.save_weights(model, merged=True)
        log.info("saved the weights of step %d as a full model: %s", step, model)
    if full:
        log.info("to serve them: vllm serve %s --served-model-name %s", shlex.quote(str(model)), alias)
    else:
        trainer.save_weights(adapter, merged=False)
        log.info("saved the weights of step %d as a LoRA adapter: %s", step, adapter)
        modules = [f"{alias}={adapter}", *(f"{alias}.{own}={adapter / own}" for own in config.policy.adapters)]
        log.info(
            "to serve them: vllm serve %s --enable-lora --max-lora-rank %d --max-loras %d --lora-modules %s",
            base, config.trainer.lora_rank, len(modules), shlex.join(modules),
        )  # fmt: skip
    log.info(
        "to verify and publish them, and to continue training on live traffic: "
        "LIGHTNING_STORE__URL=%s LIGHTNING_POLICY__DIRECTORY=%s %slightning-proxy up --model %s",
        shlex.quote(config.store.url), shlex.quote(str(directory)), "LIGHTNING_TRAINER__WEIGHTS=full " * full, base,
    )  # fmt: skip
