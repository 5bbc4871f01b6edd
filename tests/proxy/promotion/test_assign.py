"""Several proxies split one task's rollouts as one would."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.gate.sides import choose
from lightning_proxy.proxy.promotion.promotions import Promotions
from lightning_proxy.proxy.prompts.prompt_tests import PromptTests
from lightning_proxy.proxy.prompts.table import PromptTable
from lightning_proxy.proxy.store.opening import open_database
from lightning_proxy.proxy.store.store import Store
from lightning_proxy.proxy.types import RolloutName
from support.stores import store_url


async def test_siblings_that_begin_at_once_at_two_proxies_are_split_evenly(tmp_path: Path) -> None:
    databases = [await open_database(StoreConfig(url=store_url(tmp_path))) for _ in range(2)]
    stores = [Store(database) for database in databases]
    version = await stores[0].versions.new("lora", 1, {})
    await Promotions(stores[0].database).wait(version, 1)
    await Promotions(stores[0].database).begin(version, 0)
    trial = await Promotions(stores[1].database).now()
    assert trial is not None

    async def began(n: int) -> int:
        sides = partial(choose, trial.promotion, group_size=8, share=0.5)
        name = RolloutName(f"r{n // 2}", "t")  # each begins at both
        return await Promotions(stores[n % 2].database).assign(trial.promotion, name, 1000, sides)

    found = await asyncio.gather(*map(began, range(32)))
    assert found[::2] == found[1::2]
    assert Counter(found[:16:2]) + Counter(found[16::2]) == {0: 8, version: 8}
    observed = await Promotions(stores[0].database).observed(trial.promotion)
    assert sorted(one.place for one in observed) == list(range(16))
    for database in databases:
        await database.close()


async def test_rollouts_that_first_use_a_prompt_at_two_proxies_at_once_are_split_evenly(tmp_path: Path) -> None:
    databases = [await open_database(StoreConfig(url=store_url(tmp_path))) for _ in range(2)]
    stores = [Store(database) for database in databases]
    for text in ("one", "two"):
        await PromptTable(databases[0]).add("p", text)
    await asyncio.gather(*[PromptTests(store.database).begin("p", 2) for store in stores])
    (test,) = await PromptTests(stores[1].database).under_way()

    async def began(n: int) -> int:
        sides = partial(choose, test, group_size=8, share=0.5)
        return await PromptTests(stores[n % 2].database).assign(test, RolloutName(f"r{n // 2}", "t"), 1000, sides)

    found = await asyncio.gather(*map(began, range(32)))  # each at both
    assert found[::2] == found[1::2]
    observed = await PromptTests(stores[0].database).observed(test)
    assert [one.place for one in observed] == list(range(16))
    assert Counter(one.version for one in observed[:8]) == Counter(one.version for one in observed[8:]) == {1: 4, 2: 4}
    for database in databases:
        await database.close()
