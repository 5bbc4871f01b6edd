"""Undoes what `doctor --learn` changed on servers and on disk. A journal file lists the changes, in case of a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.config.root import Config
from ..core.errors import LightningError, UpstreamUnreachable
from ..serving.swap import Swap
from ..serving.vllm import VllmFleet, operator_session
from ..store.opening import opened
from ..store.store import Store
from ..trainer.lock import only_trainer, require_free
from .files import written

FRESH = "default"  # vLLM's label of the weights that it was started with


@dataclass(frozen=True, slots=True)
class LearnJournal:
    """What to undo: `directories`, and adapters whose names begin with `name` or, if `merged`, replaced weights."""

    name: str
    merged: bool
    directories: Sequence[str]

    def write(self, path: Path) -> None:
        with written(path) as part:
            part.write_text(json.dumps(asdict(self)) + "\n")


def journal_path(config: Config) -> Path:
    """Return the journal's path: next to the store's file, or with PostgreSQL in `policy.directory`."""
    if config.store.is_postgres:
        return config.policy.directory / "doctor.json"
    return Path(f"{config.store.path}-doctor.json")


async def put_back_left(config: Config, say: Callable[[str], None]) -> None:
    """Undo what a killed `doctor --learn` left, if anything. Raises ConfigError as `alone` does."""
    if journal_path(config).is_file():
        async with alone(config):
            await put_back_if_left(config, say)


async def put_back_if_left(config: Config, say: Callable[[str], None]) -> None:
    """Undo what a killed `doctor --learn` left, if anything. The caller must hold the store's locks."""
    path, killed = journal_path(config), "an earlier `doctor --learn` was killed"
    if not path.is_file():
        return
    journal = LearnJournal(**json.loads(path.read_text()))
    try:
        await put_back(config, journal)
        say(f"{killed}; its changes are undone now")
    except UpstreamUnreachable:  # a vLLM that starts again has its own weights, and no adapters
        say(f"{killed}; vLLM is not running, so none of its changes are left")
    except LightningError as error:
        say(f"{killed}, and its changes are not undone yet: {error.message}")
        return
    forget(path, journal)


def forget(path: Path, journal: LearnJournal) -> None:
    for directory in journal.directories:
        shutil.rmtree(directory, ignore_errors=True)
    path.unlink(missing_ok=True)


async def put_back(config: Config, journal: LearnJournal) -> None:
    """Unload the doctor's adapters, or load the live or base weights again. Raises LightningError if that fails."""
    async with operator_session() as session:
        fleet = VllmFleet.of(config, session)
        if journal.merged and config.store.may_be_there:
            async with opened(config.store) as database:
                problems = await Swap(Store(database), fleet, "merged", config.policy.directory).restore(set())
            if problem := next(filter(None, problems.values()), None):
                raise problem
            return
        for server in await fleet.reachable():
            if not journal.merged:
                left = [adapter for adapter in await server.adapters() if adapter.startswith(journal.name)]
                await server.unload_adapters(left)
            elif await server.weight_version() != FRESH:  # no version was ever live: the base model's weights
                root = next(str(model["root"]) for model in await server.models() if model.get("parent") is None)
                await server.load_weights(root)
                await server.go_on(FRESH)


@asynccontextmanager
async def alone(config: Config) -> AsyncIterator[None]:
    """Keep trainers and other `doctor --learn` runs out during the block. Raise ConfigError if one is running."""
    file = None if config.store.is_postgres else config.store.path
    with only_trainer(config.policy.directory, file):
        if file is not None:
            yield
            return
        async with opened(config.store) as database:
            await require_free(config, database)
            async with database.lock("trainer"):
                yield
