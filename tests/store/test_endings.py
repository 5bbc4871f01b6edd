"""Rollouts that nobody ends: they end when they are idle, and production traffic with thumbs is trained on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Event, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from support.served import proxy_in_front
from support.stores import do_again

HOUR = 3600.0
DAY = 24 * HOUR


class Past:
    """A store whose rollouts were opened two days ago, in calls of that time."""

    def __init__(self, store: Store, recorder: Recorder) -> None:
        self.store, self._recorder = store, recorder

    async def call(self, rollout_id: str, number: int, ago: float, *, took: float | None = 0.0) -> None:
        """A call that began so many seconds ago; `took` None: it is under way."""
        call_id = f"{rollout_id}-{number}"
        name, request = RolloutName(rollout_id), {"messages": [{"role": "user", "content": call_id}]}
        await self._recorder.start(
            CallStart(call_id, name, "chat/completions", "policy", 0, request, time.time() - ago)
        )
        if took is not None:
            await self._recorder.end(CallEnd(call_id, rollout_id, "ok", {}, 200, latency_ms=took * 1000))
        opened_at = "UPDATE rollouts SET created_at = MIN(created_at, :at) WHERE rollout_id = :id"
        await self.store.database.commit([(opened_at, [{"at": time.time() - 2 * DAY, "id": rollout_id}])])

    async def ended_after(self, idle_s: float) -> dict[str, str | None]:
        """The rollouts that are completed now, with the reason."""
        await self.store.rollouts.end_idle(idle_s)
        page, _ = await self.store.rollouts.page({"status": "completed"}, 1000)
        return {rollout.rollout_id: rollout.reason for rollout in page}


@pytest.fixture
async def past(tmp_path: Path) -> AsyncIterator[Past]:
    config = StoreConfig(url=f"sqlite:///{tmp_path}/store.db")
    async with opened(config) as database, Recorder(Store(database), merged=False) as recorder:
        yield Past(Store(database), recorder)


async def test_a_rollout_without_a_call_or_reward_for_so_long_is_completed_with_the_reason(past: Past) -> None:
    await past.call("idle", 0, ago=2 * HOUR)
    await past.call("busy", 0, ago=2 * HOUR)
    await past.call("busy", 1, ago=10.0)
    assert await past.ended_after(HOUR) == {"idle": "no call or reward for 3600 s"}
    assert (await past.store.rollouts.get("busy")).status == "running"


async def test_rewards_events_and_the_end_of_a_long_call_keep_a_rollout_alive(past: Past) -> None:
    for name in ("rewarded", "told of", "long"):
        await past.call(name, 0, ago=2 * HOUR, took=2 * HOUR - 60 if name == "long" else 0.0)
    await past.store.rewards.post([Reward("rewarded", 1.0, "rewarded-0", final=False)])
    await past.store.events.post(RolloutName("told of"), [Event("note", value="still here")])
    assert await past.ended_after(HOUR) == {}


async def test_a_call_under_way_keeps_its_rollout_alive_but_not_one_of_a_killed_proxy(past: Past) -> None:
    await past.call("under way", 0, ago=5 * HOUR, took=None)
    await past.call("under way", 1, ago=4 * HOUR)
    await past.call("killed", 0, ago=1.5 * DAY, took=None)
    assert list(await past.ended_after(HOUR)) == ["killed"]


async def test_a_rollout_that_was_opened_and_has_not_begun_is_not_ended(past: Past) -> None:
    await past.store.rollouts.open([(RolloutName("waits for its turn"), "hash")], {})
    await past.store.database.commit([("UPDATE rollouts SET created_at = 0", [{}])])
    assert await past.ended_after(HOUR) == {}


async def test_none_is_forgotten_when_a_transaction_is_done_again(past: Past) -> None:
    for i in range(3):
        await past.call(f"r{i}", 0, ago=2 * HOUR)
    do_again(past.store.database)
    assert await past.store.rollouts.end_idle(HOUR) == 3
    assert sorted(await past.ended_after(HOUR)) == ["r0", "r1", "r2"]


async def test_idle_rollouts_end_after_the_proxy_was_killed_by_one_of_its_workers(tmp_path: Path) -> None:
    async with proxy_in_front(tmp_path) as proxy:
        settings = yaml.safe_load(proxy.config.read_text())
        settings["rollouts"] = {"end_after_idle_s": 1.0}
        settings["proxy"]["workers"] = 2
        proxy.config.write_text(yaml.safe_dump(settings))
        await proxy.start()
        async with aiohttp.ClientSession() as session:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            async with session.post(f"{proxy.url}/rollouts/r/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
        assert proxy.process is not None
        os.kill(proxy.process.pid, signal.SIGKILL)
        await proxy.process.wait()
        await proxy.start()
        for _ in range(200):
            if rows := proxy.rows("SELECT status, reason FROM rollouts WHERE status <> 'running'"):
                break
            await asyncio.sleep(0.1)
        assert rows == [("completed", "no call or reward for 1 s")]
        await proxy.end(signal.SIGTERM)
