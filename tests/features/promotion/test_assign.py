"""Several proxies split one task's rollouts as one would."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import RolloutName
from lightning_proxy.features.promotion.promotions import Promotions
from lightning_proxy.features.promotion.splitting import choose
from lightning_proxy.store.opening import open_database
from lightning_proxy.store.store import Store
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
