"""The store within its limits: what is deleted, what never is, the space that is given back; idle rollouts end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.commands.store import shorten
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.server import RetentionConfig, StoreConfig
from lightning_proxy.core.records import CallEnd, CallStart, Event, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.database import Database
from lightning_proxy.store.opening import opened
from lightning_proxy.store.retention import DAY, Keeper, read_pages
from lightning_proxy.store.sqlite.file import lock_file
from lightning_proxy.store.store import Store
from support.sections import TrainerConfig
from support.stores import do_again, store_url

NOW = time.time()


class Recorded:
    """A store with rollouts at the times that a test wants."""

    def __init__(self, database: Database, recorder: Recorder) -> None:
        self.database, self.recorder = database, recorder
        self.store = Store(database)
        self.deleted: list[tuple[str, str]] = []
        self.trainer = TrainerConfig()

    async def call(self, name: str, call_id: str, at: float, task: str | None = None, text: str = "") -> None:
        request = {"messages": [{"role": "user", "content": text}]}
        await self.recorder.start(CallStart(call_id, RolloutName(name, task), "chat/completions", "m", 0, request, at))

    async def rollout(
        self, name: str, *, ended: float | None = None, asked: float | None = None, answered: bool = True,
        size: int = 10, reward: float | None = None, task: str | None = "t",
    ) -> None:  # fmt: skip
        """`ended` and `asked` in days ago; `size` in bytes."""
        start = NOW - (asked if asked is not None else ended or 0.0) * DAY
        await self.call(name, f"{name}-0", start, task, name * (size // len(name)))
        if answered:
            await self.recorder.end(CallEnd(f"{name}-0", name, "ok", {"id": "x"}, 200))
        if reward is not None:
            await self.store.rewards.post([Reward(name, reward, final=True)], None, b"")
        elif ended is not None:
            await self.store.rollouts.end(name, "failed", None)
        row = {"id": name, "ended": None if ended is None else NOW - ended * DAY, "asked": start}
        statement = "UPDATE rollouts SET ended_at = :ended, created_at = :asked WHERE rollout_id = :id"
        await self.database.commit([(statement, [row])])

    async def step(self, *names: str, **metrics: float) -> None:
        await self.store.steps.trained(await self.store.steps.claim(names, 0), None, metrics)

    async def tidy(self, **retention: float) -> set[str]:
        """What is left."""
        store = StoreConfig(retention=RetentionConfig(**retention))
        config = Config(store=store, trainer=self.trainer)
        await Keeper(self.database, config, lambda *what: self.deleted.append(what)).tidy()
        return {rollout.rollout_id for rollout in (await self.store.rollouts.page({}, 1000))[0]}


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[Recorded]:
    config = StoreConfig(url=store_url(tmp_path))
    async with opened(config) as database, Recorder(Store(database), merged=False) as recorder:
        yield Recorded(database, recorder)


async def test_old_rollouts_go_with_all_that_was_recorded_of_them(recorded: Recorded) -> None:
    old = {f"old{i}" for i in range(3)}
    for name in old:
        await recorded.rollout(name, ended=8, reward=1.0)
    await recorded.rollout("new", ended=6, reward=1.0)
    assert await recorded.tidy() == {*old, "new"}, "without limits"
    do_again(recorded.database)
    assert await recorded.tidy(max_age_days=7) == {"new"}
    assert sorted(recorded.deleted) == sorted((name, "age") for name in old)
    for table in ("calls", "rewards"):
        assert len(await recorded.database.all(f"SELECT 1 FROM {table}")) == 1
    assert await recorded.store.rollouts.counts() == {("train", "running"): 0, ("train", "completed"): 1}


async def test_what_runs_is_kept_and_what_nobody_ends_goes_when_it_was_quiet_for_long(recorded: Recorded) -> None:
    await recorded.rollout("under way", ended=8, asked=0.5, answered=False)
    await recorded.rollout("quiet", asked=9)
    await recorded.rollout("talking", asked=9)
    await recorded.call("talking", "t-1", NOW)
    assert await recorded.tidy(max_age_days=7) == {"under way", "talking"}


@pytest.mark.sqlite
async def test_a_clock_that_was_wrong_for_a_while_does_not_end_the_retention(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.store.retention.LOOK", 1)
    await recorded.rollout("tomorrow", ended=-1, size=200_000)
    for i in range(4):
        await recorded.rollout(f"old{i}", ended=9 - i, size=200_000)
    await recorded.rollout("new", ended=0.1)
    left = await recorded.tidy(max_gib=800_000 / 2**30)
    assert "old0" not in left and {"tomorrow", "new"} <= left
    assert await recorded.tidy(max_age_days=3) == {"tomorrow", "new"}


async def test_a_step_that_is_being_trained_or_published_keeps_its_rollouts(recorded: Recorded) -> None:
    for name in ("first", "second", "third"):
        await recorded.rollout(name, ended=8, reward=1.0)
    await recorded.step("first", reward_mean=1.0)
    await recorded.store.steps.claim(["second"], 0)
    await recorded.step("third")
    assert await recorded.tidy(max_age_days=7) == {"second", "third"}
    assert [step.metrics for step in await recorded.store.steps.all()] == [{"reward_mean": 1.0}, {}]


@pytest.mark.sqlite
async def test_by_size_the_oldest_go_and_those_that_wait_for_the_trainer_last(recorded: Recorded) -> None:
    empty, size = (await read_pages(recorded.database)).bytes, 2**18
    for i in range(4):
        await recorded.rollout(f"waits-{i}", ended=0.1, size=size, reward=1.0)
        await recorded.rollout(f"ended-{i}", ended=0.1, size=size)
    assert await recorded.tidy(max_gib=(empty + 5.5 * size) / 2**30) == {"ended-3", *(f"waits-{i}" for i in range(4))}
    assert await recorded.tidy(max_gib=(empty + 2.5 * size) / 2**30) == {f"waits-{i}" for i in (2, 3)}
    assert {why for _, why in recorded.deleted} == {"size"}
    assert (await read_pages(recorded.database)).bytes < empty + 2.5 * size


@pytest.mark.parametrize(
    ("trainer", "task", "left"),
    [
        ({"failed_rollouts": "drop"}, "t", "trained"),
        ({"failed_rollouts": -1.0}, "t", "failed"),
        ({"failed_rollouts": -1.0, "lone_rollouts": "drop"}, None, "trained"),
        ({"failed_rollouts": -1.0, "lone_rollouts": "running"}, None, "failed"),
    ],
)
@pytest.mark.sqlite
async def test_what_counts_for_the_trainer_goes_last(
    recorded: Recorded, trainer: dict[str, Any], task: str | None, left: str
) -> None:
    """Failed rollouts where failures count, rollouts without a task where these are trained on."""
    recorded.trainer = TrainerConfig.model_validate(trainer)
    await recorded.rollout("failed", ended=0.1, size=2**19, task=task)
    await recorded.rollout("trained", ended=0.1, size=2**19, reward=1.0)
    await recorded.step("trained")
    await recorded.step()  # the rollouts of the last step stay
    assert await recorded.tidy(max_gib=1 / 1024) == {left}


async def test_answers_to_repeated_posts_are_forgotten_after_a_week(recorded: Recorded) -> None:
    await recorded.rollout("r")
    await recorded.store.rewards.post([Reward("r", 1.0)], "old", b"a")
    await recorded.database.commit([("UPDATE idempotency SET created_at = created_at - 8 * 86400", [{}])])
    await recorded.store.rewards.post([Reward("r", 1.0)], "new", b"a")
    await recorded.tidy()
    assert [row["key"] for row in await recorded.database.all("SELECT key FROM idempotency")] == ["new"]


@pytest.mark.sqlite
async def test_compact_gives_back_what_is_free_while_the_proxy_serves(recorded: Recorded, tmp_path: Path) -> None:
    for i in range(20):
        await recorded.rollout(f"r{i}", ended=0, size=2**18)
    for i in range(20):
        await recorded.store.rollouts.delete(f"r{i}")
    with lock_file(Path(recorded.database.where)):  # as the proxy does
        before, after = await shorten(StoreConfig(url=store_url(tmp_path)))
    assert before.bytes > 5 * 2**20
    assert (after.bytes < 2**20, after.free) == (True, 0)
    await recorded.rollout("afterwards")


async def test_of_too_many_conversations_those_that_were_quiet_the_longest_are_forgotten(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_proxy.store.retention.CONVERSATIONS", 3)
    insert = "INSERT INTO conversation_points (digest, rollout_id, at) VALUES (:digest, :rollout_id, :at)"
    rows = [{"digest": bytes([i]) * 32, "rollout_id": f"r{i}", "at": NOW - 1000 + i} for i in range(5)]
    await recorded.database.commit([(insert, rows)])
    await recorded.tidy()
    left = await recorded.database.all("SELECT rollout_id FROM conversation_points ORDER BY at")
    assert [row["rollout_id"] for row in left] == ["r2", "r3", "r4"]


async def test_a_rollout_ends_when_nothing_happened_in_it_for_so_long(recorded: Recorded) -> None:
    """Calls, rewards, events, the end of a long call keep it alive; a call under way, unless its proxy was killed."""
    hours = 1 / 24
    for name in ("idle", "idle too", "busy", "rewarded", "told of"):
        await recorded.rollout(name, asked=2 * hours)
    for name, asked in (("long", 2 * hours), ("under way", 5 * hours), ("killed", 1.5)):
        await recorded.rollout(name, asked=asked, answered=False)
    await recorded.recorder.end(CallEnd("long-0", "long", "ok", {}, 200, latency_ms=(2 * 3600 - 60) * 1000))
    await recorded.call("busy", "busy-1", NOW - 10)
    await recorded.recorder.end(CallEnd("busy-1", "busy", "ok", {}, 200))
    await recorded.store.rewards.post([Reward("rewarded", 1.0, "rewarded-0", final=False)])
    await recorded.store.events.post(RolloutName("told of"), [Event("note", value="still here")])
    await recorded.store.rollouts.open([(RolloutName("waits for its turn"), "hash")], {})
    await recorded.database.commit([("UPDATE rollouts SET created_at = 0", [{}])])
    do_again(recorded.database)
    assert await recorded.store.rollouts.end_idle(3600.0) == 3
    page, _ = await recorded.store.rollouts.page({"status": "completed"}, 1000)
    assert {rollout.rollout_id: rollout.reason for rollout in page} == dict.fromkeys(
        ("idle", "idle too", "killed"), "no call or reward for 3600 s"
    )
