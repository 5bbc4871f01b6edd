"""A store of an earlier release goes on where it was: the tests that are under way in it, of versions."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.promotion.promotions import Promotions
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.sqlite.migrate import FIRST
from lightning_proxy.proxy.store.store import Store
from support.paths import ROOT

SCRIPTS = sorted((ROOT / "proxy/store/migrations").glob("*.sql"))
UNDER_WAY = """
INSERT INTO policy_versions (version, status, created_at) VALUES (1, 'candidate', 1);
INSERT INTO promotions (version, against, status, began_at) VALUES (1, 0, 'testing', 1);
"""


def made_by_release(path: Path, last: int, rows: str = "") -> StoreConfig:
    """A store with so many scripts of the core, and none of a room."""
    with closing(sqlite3.connect(path)) as db:
        for script in SCRIPTS[:last]:
            db.executescript(script.read_text())
        db.executescript(rows)
        db.execute(f"PRAGMA user_version = {FIRST + last}")
        db.commit()
    return StoreConfig(url=f"sqlite:///{path}")


@pytest.mark.sqlite
async def test_tests_under_way_at_an_upgrade_go_on_until_somebody_decides(tmp_path: Path) -> None:
    config = made_by_release(tmp_path / "store.db", len(SCRIPTS), UNDER_WAY)
    async with opened(config) as database:
        promotions = Promotions(database)
        assert await promotions.under_way() is not None
        await Store(database).versions.set_live(0)
        ended = (await promotions.last())[1]
        assert (ended.status, ended.reason) == ("ended", "version 0 was made live during the test")
        (tested,) = await database.all("SELECT status FROM policy_versions WHERE version = 1")
        assert tested["status"] == "ready"


@pytest.mark.sqlite
@pytest.mark.parametrize("last", [1, 9])
async def test_a_store_of_an_early_release_tests_versions(tmp_path: Path, last: int) -> None:
    async with opened(made_by_release(tmp_path / "store.db", last)) as database:
        store, promotions = Store(database), Promotions(database)
        version = await store.versions.new("lora", 1, {})
        await promotions.wait(version, 1)
        await promotions.begin(version, 0)
        test = await promotions.under_way()
        assert test is not None and await promotions.decide(test, "promoted", "better", {})
        assert ((await store.versions.live()).version, (await promotions.last())[version].status) == (1, "promoted")
