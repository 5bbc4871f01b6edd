"""A store of an earlier release goes on where it was: the tests that are under way in it, of both kinds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lightning_proxy.proxy.config.server import StoreConfig
from lightning_proxy.proxy.promotion.promotions import Promotions
from lightning_proxy.proxy.prompts.prompt_tests import PromptTests
from lightning_proxy.proxy.prompts.table import PromptTable
from lightning_proxy.proxy.store.opening import opened
from lightning_proxy.proxy.store.sqlite.migrate import FIRST
from lightning_proxy.proxy.store.store import Store
from support.paths import ROOT

SCRIPTS = sorted((ROOT / "proxy/store/migrations").glob("*.sql"))
UNDER_WAY = """
INSERT INTO policy_versions (version, status, created_at) VALUES (1, 'candidate', 1);
INSERT INTO promotions (version, against, status, began_at) VALUES (1, 0, 'testing', 1);
INSERT INTO prompts (name, role, created_at) VALUES ('p', 'system', 1);
INSERT INTO prompt_versions (name, version, text, created_at) VALUES ('p', 1, 'a', 1), ('p', 2, 'b', 1);
INSERT INTO prompt_log (name, version, at) VALUES ('p', 1, 1);
INSERT INTO prompt_tests (name, version, against, status, began_at) VALUES ('p', 2, 1, 'testing', 1);
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
        promotions, prompts = Promotions(database), PromptTests(database)
        assert [test.status for test in (*await promotions.under_way(), *await prompts.under_way())] == ["testing"] * 2
        await Store(database).versions.set_live(0)
        await PromptTable(database).promote("p", 1)
        ended = [(await promotions.last())[1], *await prompts.last("p")]
        assert [(test.status, test.reason) for test in ended] == [
            ("ended", f"version {live} was made live during the test") for live in (0, 1)
        ]
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
        (test,) = await promotions.under_way()
        assert await promotions.decide(test, "promoted", "better", {})
        assert ((await store.versions.live()).version, (await promotions.last())[version].status) == (1, "promoted")
