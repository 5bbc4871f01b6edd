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


async def test_rewards_times_and_beginnings_of_ids_are_looked_for(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await opened(store, {"ab1": 0.0, "ab2": 0.5, "ac3": None, "AB4": 1.0})
        assert await ids(store, min_reward=0.5) == ["AB4", "ab2"]
        assert await ids(store, min_reward=0.1, max_reward=0.9) == ["ab2"]
        assert await ids(store, prefix="ab") == ["ab2", "ab1"]
        assert await ids(store, prefix="ab", max_reward=0.1, status="completed") == ["ab1"]
        assert await ids(store, prefix="ab", agent="nobody") == []
        second = (await store.rollouts.get("ab2")).created_at
        assert await ids(store, since=second) == ["AB4", "ac3", "ab2"]


async def test_pages_of_a_search_go_on_and_end(running: Running, tmp_path: Path) -> None:
    async with running(tmp_path) as system, system.store() as store:
        await opened(store, {f"r{i}": float(i % 2) for i in range(6)})
        first, cursor = await store.rollouts.page({"min_reward": 1}, 2)
        rest, end = await store.rollouts.page({"min_reward": 1}, 2, cursor)
        assert ([r.rollout_id for r in first], [r.rollout_id for r in rest], end) == (["r5", "r3"], ["r1"], None)


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


@pytest.mark.parametrize("text", ['say "50%_off"', "ÄPFEL sind", "two\nlines", "!"])
async def test_texts_are_found_as_they_were_said(running: Running, tmp_path: Path, text: str) -> None:
    async with running(tmp_path) as system:
        said = {"model": "policy", "messages": [{"role": "user", "content": f"please {text} now"}]}
        await system.call("POST", "/v1/chat/completions", said, X_Rollout_Id="r1")
        said["messages"][0]["content"] = "something else: 50 off"  # type: ignore[index]
        await system.call("POST", "/v1/chat/completions", said, X_Rollout_Id="r2")
        async with system.store() as store:
            assert await ids(store, text=text) == ["r1"]
            assert await ids(store, text="NOTHING of it") == []
