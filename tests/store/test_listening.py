"""What another process writes to a PostgreSQL store wakes those that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Limits, Reward, RolloutName
from lightning_proxy.features.prompts.table import PromptTable
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Changes, Database, Topic
from lightning_proxy.store.opening import opened
from lightning_proxy.store.postgres.database import Heard
from lightning_proxy.store.store import Store
from support.postgres import Server, postgres_server

NEVER_S = 3600.0  # nobody waits for it


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def config(server: Server) -> StoreConfig:
    return StoreConfig(url=server.new_database())


@pytest.fixture
async def here(config: StoreConfig) -> AsyncIterator[Database]:
    async with opened(config) as database:
        yield database


@pytest.fixture
async def there(config: StoreConfig, here: Database) -> AsyncIterator[Store]:
    """The store of another process, which tells what it records as well."""
    async with opened(config) as database:
        await listening(database, "calls")
        store = Store(database)
        await store.rollouts.open([(RolloutName("r"), "hash")], {})
        yield store


async def listening(database: Database, topic: Topic) -> Changes:
    """Return what waits for a topic, once it hears."""
    changes = database.changes(topic)
    await until_it_hears(changes)
    return changes


async def until_it_hears(changes: Changes) -> None:
    assert isinstance(changes, Heard)
    async with asyncio.timeout(20):
        while not changes.hears:
            await changes.wait(0.01)


async def soon(changes: Changes) -> None:
    async with asyncio.timeout(20):
        await changes.wait(0, NEVER_S)


async def make_key(store: Store) -> None:
    await store.keys.create("k", "agent", Limits(), recording=True)


async def revoke_key(store: Store) -> None:
    await make_key(store)
    await store.keys.revoke("k")


async def add_prompt(store: Store) -> None:
    await PromptTable(store.database).add("writer", "Write.")


async def promote_prompt(store: Store) -> None:
    await add_prompt(store)
    await PromptTable(store.database).add("writer", "Write well.", parent=1)
    await PromptTable(store.database).promote("writer", 2)


async def post_reward(store: Store) -> None:
    await store.rewards.post([Reward("r", 1.0)])


async def end_rollout(store: Store) -> None:
    await store.rollouts.end("r", "failed", None)


async def promote_version(store: Store) -> None:
    version = await store.versions.new("merged", 1, {})
    await store.versions.saved(version, "v1", None)
    await store.versions.set_live(version)


async def finish_step(store: Store) -> None:
    await store.steps.trained(await store.steps.claim(["r"], 0), None, {})


async def record_call(store: Store) -> None:
    async with Recorder(store, merged=False) as recorder:
        start = CallStart("c", RolloutName("r"), "chat/completions", "policy", 0, {"n": 1}, 100.0)
        await recorder.start(start)
        await recorder.end(CallEnd("c", "r", "ok", {"id": "x"}, 200))


WRITES = [
    ("keys", make_key), ("keys", revoke_key), ("prompts", add_prompt), ("prompts", promote_prompt),
    ("rewards", post_reward), ("rewards", end_rollout), ("live", promote_version), ("steps", finish_step),
    ("calls", record_call),
]  # fmt: skip


@pytest.mark.parametrize(("topic", "write"), [pytest.param(*pair, id=pair[1].__name__) for pair in WRITES])
async def test_who_waits_is_woken_by_what_another_process_writes(
    here: Database, there: Store, topic: Topic, write: Callable[[Store], Awaitable[None]]
) -> None:
    changes = await listening(here, topic)
    waiting = asyncio.create_task(soon(changes))
    await asyncio.sleep(0)
    await write(there)
    await waiting


async def test_what_is_written_while_nobody_waits_is_not_missed(here: Database, there: Store) -> None:
    changes, others = await listening(here, "keys"), await listening(here, "keys")
    await make_key(there)
    await soon(others)  # it was told of
    await soon(changes)


async def test_others_sleep_on(here: Database, there: Store) -> None:
    keys, prompts = await listening(here, "keys"), await listening(here, "prompts")
    sleeping = asyncio.create_task(prompts.wait(0, NEVER_S))
    await make_key(there)
    await soon(keys)
    assert not sleeping.done()
    sleeping.cancel()


async def test_who_waits_looks_by_itself_until_it_hears_again(
    server: Server, config: StoreConfig, here: Database, there: Store
) -> None:
    changes = await listening(here, "keys")
    await asyncio.to_thread(server.kill)
    await soon(changes)  # nothing can be heard
    await changes.wait(0.05)  # so it looks
    await asyncio.to_thread(server.start)
    await until_it_hears(changes)
    waiting = asyncio.create_task(soon(changes))
    await make_key(there)
    await waiting


async def test_a_store_in_another_schema_of_the_database_wakes_nobody(
    config: StoreConfig, here: Database, there: Store
) -> None:
    await here.all("CREATE SCHEMA other")
    keys, prompts = await listening(here, "keys"), await listening(here, "prompts")
    sleeping = asyncio.create_task(keys.wait(0, NEVER_S))
    elsewhere = config.model_copy(update={"url": f"{config.url}&options=-csearch_path%3Dother"})
    async with opened(elsewhere) as database:
        await make_key(Store(database))
    await add_prompt(there)
    await soon(prompts)  # what is told of later
    assert not sleeping.done()
    sleeping.cancel()
