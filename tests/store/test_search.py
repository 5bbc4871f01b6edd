"""Searching among rollouts: what is found, in what order, and that a search is bounded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.records import Reward, RolloutName
from lightning_proxy.store import rollouts as searching

Running = Callable[..., AbstractAsyncContextManager[Any]]


async def opened(store: Any, rewards: dict[str, float | None]) -> None:
    for name in rewards:
        await store.rollouts.open([(RolloutName(name, "t"), f"hash of {name}")], {})
    await store.rewards.post([Reward(name, value) for name, value in rewards.items() if value is not None])


async def ids(store: Any, limit: int = 100, cursor: int | None = None, **filters: object) -> list[str]:
    return [r.rollout_id for r in (await store.rollouts.page(filters, limit, cursor))[0]]


async def test_a_search_looks_at_so_many_and_can_go_on(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "CHUNK", 2)
    monkeypatch.setattr(searching, "MOST", 4)
    async with running(tmp_path) as system, system.store() as store:
        await opened(store, {f"r{i}": float(i == 0) for i in range(6)})
        found, cursor = await store.rollouts.page({"min_reward": 1}, 9)
        assert found == [] and cursor is not None
        assert await ids(store, min_reward=1, cursor=cursor) == ["r0"]


async def test_texts_are_found_as_they_were_said(running: Running, tmp_path: Path) -> None:
    texts = ['say "50%_off"', "ÄPFEL sind", "two\nlines", "!"]
    async with running(tmp_path) as system:
        for i, text in enumerate([*texts, "something else: 50 off"]):
            said = {"model": "policy", "messages": [{"role": "user", "content": f"please {text} now"}]}
            await system.call("POST", "/v1/chat/completions", said, X_Rollout_Id=f"r{i}")
        async with system.store() as store:
            assert [await ids(store, text=text) for text in texts] == [["r0"], ["r1"], ["r2"], ["r3"]]
            assert await ids(store, text="NOTHING of it") == []
