"""Builds the trainer: its core loop, and the optional parts that the configuration asks for.

The side rooms are `judge/`, `guides/`, `tuning/`, `sft/`, `preferences/`, `promotion/`, `offline/`, `distributed/` and
`backends/`. The core imports none.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from ..proxy.config.root import Config
from ..proxy.config.trainer import TrainerConfig
from ..proxy.errors import ConfigError, StoreUnavailable
from ..proxy.policy.mode import decide
from ..proxy.policy.operator import operator_headers
from ..proxy.policy.swap import Swap
from ..proxy.policy.vllm import VllmFleet, VllmServer, operator_session
from ..proxy.promotion.splitting import candidates_server
from ..proxy.store.database import Database
from ..proxy.store.opening import opened
from ..proxy.store.resources.promotions import NOT_GATED
from ..proxy.store.store import Store
from ..proxy.types import PublishMode
from .backends.tinker_trainer import TinkerTrainer
from .collect.siblings import AskJudge
from .credit.strategies import STRATEGIES
from .distributed import ranks
from .guides.guides import Guides
from .guides.hints import Hints
from .guides.teacher import Teacher
from .hooks import load
from .judge.judge import Judge
from .loop import Show, TrainingLoop, show_nothing
from .offline import data
from .offline.offline import OfflineRun, offline_config, save_weights
from .preferences.dpo import DpoRun
from .preferences.kto import KtoRun
from .promotion.gated import GatedPublisher
from .publish import NoPublisher, Publisher
from .sft.sft import SftRun
from .step.engine import TrainingEngine
from .step.trainer import LightningTrainer
from .tuning.run import TuningRun
from .types import Guide, Method
from .waiting import GuideError, pause
from .weights.choice import warn_of_rate

log = logging.getLogger(__name__)

TUNING: Mapping[Method, type[TuningRun[Any]]] = {run.method: run for run in (SftRun, DpoRun, KtoRun)}


async def train(
    config: Config, stop: asyncio.Event, *, once: bool = False, show: Show = show_nothing, method: Method = "rl"
) -> None:
    """Train on the configured store and publish to its vLLM until `stop` is set; `show` every step."""
    upstream = config.policy_upstream
    if upstream is None:
        raise ConfigError("upstreams: the trainer needs one of kind vllm")
    data.check_store(config)
    with only_trainer(config.policy.directory, None if config.store.is_postgres else config.store.path):
        async with opened(config.store) as database:
            if config.store.is_postgres:
                await _require_free(config, database)
            async with _trainer(config) as trainer, operator_session() as session:

                async def work() -> None:
                    store = Store(database)
                    mode = await decide(config, store, "trainer")
                    headers = upstream.credentials | operator_headers(config.policy.directory)
                    vllm = VllmFleet(session, upstream.published_to, headers, config.policy.model)
                    publisher = await _publisher(config, store, vllm, mode, trainer)
                    await _train(config, store, trainer, publisher, stop, once=once, show=show, method=method)

                await (_while_alone(config, database, stop, work) if config.store.is_postgres else work())


async def _publisher(
    config: Config, store: Store, vllm: VllmFleet, mode: PublishMode, trainer: TrainingEngine
) -> Publisher:
    if config.policy.is_gated:
        swap = Swap(store, vllm, mode, config.policy.directory, candidates_server(config, store))
        return GatedPublisher(config, store, swap, trainer)
    await store.promotions.end(NOT_GATED)
    return Publisher(config.policy, store, Swap(store, vllm, mode, config.policy.directory), trainer)


async def _train(
    config: Config,
    store: Store,
    trainer: TrainingEngine,
    publisher: Publisher,
    stop: asyncio.Event,
    *,
    once: bool,
    show: Show,
    method: Method,
) -> None:
    if method in TUNING:
        assert isinstance(trainer, LightningTrainer)
        await TUNING[method](config, store, trainer, publisher, show).run(stop)
        return
    warn_of_rate(config.trainer, config.trainer.learning_rate)
    judge = _judge(config, store)
    async with _guide(config.trainer, store, trainer) as guide:
        loop = TrainingLoop(config, store, trainer, publisher, show=show, judge=judge, guide=guide)
        await loop.run(stop, once=once)


async def train_offline(
    config: Config,
    stop: asyncio.Event,
    source: Path | None,
    directory: Path | None,
    *,
    epochs: int = 1,
    method: Method = "rl",
    show: Show = show_nothing,
) -> None:
    """Train on `source` (a store or an export; None: the configured store), which is only read."""
    if source is None and config.store.is_postgres:
        raise ConfigError(
            "train --offline works on a file: make one with `lightning-proxy store migrate postgresql://… "
            "sqlite:///copy.db`, and name it with --data copy.db"
        )
    directory = (directory or config.policy.directory / "offline").expanduser().absolute()
    with only_trainer(directory, directory / data.STORE_FILE):
        store_config = await data.prepare(source or config.store.path, directory)
        config = offline_config(config, directory, store_config)
        async with _trainer(config) as trainer:
            async with opened(store_config) as database:
                store = Store(database)
                if method in TUNING:
                    assert isinstance(trainer, LightningTrainer)
                    last = await TUNING[method](config, store, trainer, NoPublisher(), show).run(stop)
                else:
                    warn_of_rate(config.trainer, config.trainer.learning_rate)
                    judge = _judge(config, store)
                    async with _guide(config.trainer, store, trainer) as guide:
                        last = await OfflineRun(config, store, trainer, epochs, judge, guide).run(stop)
            if last is not None:
                if stop.is_set():  # the trainer's own weights may be on their way to the next step
                    await asyncio.to_thread(trainer.load, Path(str(last.checkpoint)))
                await asyncio.to_thread(save_weights, config, trainer, last.step)


def check_hooks(config: TrainerConfig) -> None:
    """Raise ConfigError if a function of the user's own cannot be had, before a model is loaded."""
    for name in {config.credit} if isinstance(config.credit, str) else {*config.credit.values()}:
        if name not in STRATEGIES:
            load("trainer.credit", name)
    if config.loss is not None:
        load("trainer.loss", config.loss)


def follow(config: Config) -> None:
    """Repeat the work of the leading process until it ends. All other processes of a launcher run this."""
    processes = ranks.Ranks()
    processes.follow(LightningTrainer(config.trainer, config.policy, processes))


@contextmanager
def only_trainer(directory: Path, store: Path | None) -> Iterator[None]:
    """Lock the directory and the store: two trainers would overwrite each other's checkpoints, or share the rollouts.

    The locks go with the process.
    """
    locks = [(directory, directory / "trainer.lock")]
    if store is not None:
        store = store.expanduser().resolve()
        locks.append((store, Path(f"{store}-trainer")))
    with ExitStack() as stack:
        for held, lock in locks:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another trainer works on {held}; stop it first") from None
        yield


async def _require_free(config: Config, database: Database) -> None:
    """Raise ConfigError while another trainer works on a store that is no file, on whichever machine."""
    async with database.alone("trainer") as alone:
        if not alone:
            raise ConfigError(f"another trainer works on {config.store.where}; stop it first")


async def _while_alone(
    config: Config, database: Database, stop: asyncio.Event, work: Callable[[], Awaitable[None]]
) -> None:
    """Do `work` while no other trainer works on the store. Where the lock is lost, it ends and waits for the lock."""
    held = False
    while not stop.is_set():
        try:
            async with database.alone("trainer") as alone:
                if alone:
                    held = True
                    await work()
                    return
            if not held:
                await _require_free(config, database)
        except StoreUnavailable as error:
            if not held:
                raise
            log.error("the trainer waits: %s", error)
        await pause(stop)


@asynccontextmanager
async def _trainer(config: Config) -> AsyncIterator[TrainingEngine]:
    """A trainer in this process and those that the launcher started beside it, or one on a service."""
    check_hooks(config.trainer)
    processes = ranks.processes()
    trainer: TrainingEngine
    if config.trainer.backend == "tinker":
        trainer = await asyncio.to_thread(TinkerTrainer, config.trainer, config.policy)
    else:
        trainer = await asyncio.to_thread(LightningTrainer, config.trainer, config.policy, processes)
    try:
        yield trainer
        processes.end()  # not after an error, which the other processes must take for a failure
    finally:
        if isinstance(trainer, TinkerTrainer):
            await asyncio.to_thread(trainer.close)
        else:
            trainer.trackers.close()


@asynccontextmanager
async def _guide(config: TrainerConfig, store: Store, trainer: TrainingEngine) -> AsyncIterator[Guide | None]:
    """What says more of a step's tokens than their rewards do; None if nothing does."""
    if not config.guided:
        yield None
        return
    assert isinstance(trainer, LightningTrainer)
    tokenizer, guides = trainer.processing_class, list[Guide]()
    async with operator_session() as session:
        if config.teacher.base_url is not None:
            url, headers, timeout_s = config.teacher.base_url, config.teacher.credentials, config.teacher.timeout_s
            teacher = Teacher(config.teacher, VllmServer(session, url, headers, timeout_s=timeout_s), tokenizer)
            try:
                await teacher.check()
            except GuideError as error:
                log.warning("steps will wait: %s", error)
            guides.append(teacher)
        if config.hints != "off":
            guides.append(Hints(config, store, tokenizer, trainer.max_tokens, trainer.scores_of))
        yield Guides(guides)


def _judge(config: Config, store: Store) -> AskJudge | None:
    return Judge(config.trainer, store).missing if config.trainer.judged else None
