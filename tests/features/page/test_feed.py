"""All feeds of a proxy share one look at the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.store.sqlite.database import SqliteDatabase

Running = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.sqlite
async def test_many_feeds_look_at_the_store_as_often_as_one(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, quick = 0, SqliteDatabase.quick

    async def counted(database: SqliteDatabase, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        return await quick(database, *args)

    monkeypatch.setattr(SqliteDatabase, "quick", counted)
    async with running(tmp_path) as system, AsyncExitStack() as stack:
        found = []
        for feeds in (1, 40):
            for _ in range(feeds):
                answer = await stack.enter_async_context(system.session.get(f"{system.url}/feed"))
                assert (await answer.content.readline()).startswith(b"id: ")
            before = looks
            await asyncio.sleep(2)
            found.append(looks - before)
        assert found[1] < 3 * found[0]
