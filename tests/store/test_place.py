"""A store whose file is removed, moved or replaced while the proxy serves: what has no place is not acknowledged."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

REWARD = {"rollout_id": "before", "reward": 1.0, "final": False}
pytestmark = pytest.mark.sqlite


@pytest.mark.parametrize("how", ["all removed", "moved", "log removed", "emptied"])
async def test_nothing_is_acknowledged_that_no_file_will_have(
    running: Any, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, away = tmp_path / "store.db", tmp_path / "away.db"
    told = "it has 0 bytes" if how == "emptied" else "was removed or replaced"
    async with running(tmp_path) as system:
        assert (await system.chat("before"))[0] == 200
        match how:
            case "all removed":
                for one in tmp_path.glob("store.db*"):
                    one.unlink()
            case "moved":
                file.rename(away)
            case "emptied":
                file.write_bytes(b"")
            case "log removed":
                (tmp_path / "store.db-wal").unlink()
        for rollout in ("before", "after"):
            status, answer = await system.chat(rollout)
            assert status == 503 and told in answer["error"]["message"]
        assert (await system.call("POST", "/reward", REWARD))[0] == 503
        status, answer = await system.call("GET", "/readyz")
        assert status == 503 and told in answer["store"]
        assert caplog.text.count("records cannot be written") == 1
        if how == "moved":
            away.rename(file)
            assert (await system.chat("again"))[0] == 200, "it has its place again"
            assert caplog.text.count("records can be written again") == 1


async def test_a_damaged_store_is_told_by_readyz_and_the_log(
    running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as system:
        assert (await system.chat("before"))[0] == 200
    file = tmp_path / "store.db"
    with closing(sqlite3.connect(file)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'events'").fetchone()
    whole = file.read_bytes()
    file.write_bytes(whole[: (page - 1) * 4096] + b"\xff" * 4096 + whole[page * 4096 :])
    async with running(tmp_path) as system:
        async with asyncio.timeout(20):
            while "damaged" not in (ready := (await system.call("GET", "/readyz")))[1]["store"]:
                await asyncio.sleep(0.05)
        assert (ready[0], ready[1]["status"]) == (200, "degraded"), "calls are answered and recorded"
    assert "store.db is damaged" in caplog.text


async def test_a_store_that_lost_its_content_is_told_by_readyz_and_the_log(
    running: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as system:
        assert (await system.chat("before"))[0] == 200
        assert "damaged" not in (await system.call("GET", "/readyz"))[1]["store"]
    (tmp_path / "store.db").write_bytes(b"")
    async with running(tmp_path) as system:
        status, answer = await system.call("GET", "/readyz")
    assert status == 200 and "it had 0 bytes" in answer["store"] and "it had 0 bytes" in caplog.text
