"""Which rollouts are siblings: those opened together, else those of a task as they were opened. When a step begins."""

import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from zoneinfo import ZoneInfo

import pytest

from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.root import Config
from lightning_proxy.core.config.trainer import ScheduleConfig
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import Limits, Reward, RolloutName
from lightning_proxy.core.returns import Rules
from lightning_proxy.trainer.collect import collector as collecting
from lightning_proxy.trainer.collect import groups
from lightning_proxy.trainer.collect.collector import STALE, Collector
from lightning_proxy.trainer.collect.groups import Schedule
from lightning_proxy.trainer.types import Batch
from support.rewarded import Traffic, advantages
from support.sections import TrainerConfig

EIGHT = {"group_size": 8, "tasks_per_step": 2}
SMALL: dict[str, Any] = {"group_size": 2, "tasks_per_step": 1, "baseline": "dr_grpo"}


def halves(prefix: str, count: int = 8) -> dict[str, float]:
    """Siblings by name, half of them right."""
    return {f"{prefix}{i}": float(i % 2) for i in range(count)}


async def of_key(traffic: Traffic, scope: Any, task: str | None, *names: str) -> None:
    """Open rollouts one by one with a new key, or without one."""
    key_id = None
    if scope is not None:
        _, key = await traffic.store.keys.create(names[0], "agent", Limits(), recording=True, scope=scope)
        key_id = key.key_id
    for name in names:
        await traffic.store.rollouts.open([(RolloutName(name, task, key_id=key_id), f"hash of {name}")], {})


@pytest.mark.parametrize("together", [True, False])
async def test_groups_are_those_that_were_opened_whichever_siblings_end_first(traffic: Traffic, together: bool) -> None:
    rewards = halves("a") | halves("b")
    for names in ([*halves("a")], [*halves("b")]):
        for of in [names] if together else zip(names, strict=True):
            await traffic.open("t", *of)
    await traffic.rollouts("t", {name: 1.0 for name in rewards if rewards[name]})
    assert await traffic.batch(**EIGHT) is None, "eight have ended, and no group has"
    await traffic.rollouts("t", {name: 0.0 for name in rewards if not rewards[name]})
    found = await traffic.taken(**EIGHT)
    assert Counter(advantages(found).values()) == {0.5: 8, -0.5: 8}
    assert [found.metrics[name] for name in ("groups", "groups_trained", "groups_equal")] == [2, 2, 0]


async def test_a_set_smaller_than_the_trainers_group_is_one_and_a_larger_one_waits_for_all(traffic: Traffic) -> None:
    await traffic.open("t", "a", "b")
    await traffic.open("t", *(f"c{i}" for i in range(5)))
    await traffic.rollouts("t", {"a": 0.0, "b": 1.0, "c0": 0.0, "c1": 0.0, "c2": 1.0, "c3": 1.0})
    assert advantages(await traffic.batch(group_size=4)) == {"a-0": -0.5, "b-0": 0.5}
    assert await traffic.batch(group_size=4) is None
    await traffic.rollout("c4", "t", 0.5)
    assert set(advantages(await traffic.batch(group_size=4))) == {f"c{i}-0" for i in range(5)}


async def test_a_sibling_that_fails_is_discarded_or_is_stale_leaves_the_others_a_group(traffic: Traffic) -> None:
    await traffic.open("t", "good", "bad", "failed", "discarded", "stale")
    await traffic.open("t", "next 0", "next 1")
    await traffic.rollout("next 0", "t", 5.0)
    for status in ("failed", "discarded"):
        await traffic.rollout(status, "t", None, status=status)
    await traffic.rollout("stale", "t", 9.0, version=-100)
    await traffic.rollout("good", "t", 1.0)
    assert await traffic.batch(group_size=2) is None, "one is still running"
    await traffic.rollout("bad", "t", 0.0)
    assert advantages(await traffic.batch(group_size=2)) == {"good-0": 0.5, "bad-0": -0.5}
    assert await traffic.dropped("failed", "stale") == ["failed or discarded", STALE]


async def test_a_sibling_that_never_ends_holds_up_its_group_for_a_time_and_no_other(traffic: Traffic) -> None:
    for names in (("a", "b", "never"), ("c", "d", "e")):
        for name in names:
            await traffic.open("t", name)
    await traffic.rollouts("t", {"a": 0.0, "b": 1.0, "c": 2.0, "d": 2.0, "e": 5.0})
    assert advantages(await traffic.batch(group_size=3)) == {"c-0": -1.0, "d-0": -1.0, "e-0": 2.0}
    assert await traffic.batch(group_size=3) is None
    # A sibling was opened at most so long before: that time is not over here, and the wait for it is.
    waited = traffic.collector(group_size=3)
    assert await waited.next_batch(0, fewer=True) is None
    waited.waiting._has_waited = lambda *_: True  # type: ignore[method-assign]
    assert advantages(await waited.next_batch(0, fewer=True)) == {"a-0": -0.5, "b-0": 0.5}
    await traffic.rollout("never", "t", 2.0)
    assert advantages(await traffic.batch(group_size=3)) == {"never-0": 1.0}, "compared with all three"


async def test_rollouts_without_a_reward_take_no_place_in_a_group_of_live_traffic(traffic: Traffic) -> None:
    for i in range(12):
        await traffic.rollout(f"r{i}", "t", float(i % 8) if i % 4 == 0 else None)
    found = advantages(await traffic.batch(group_size=3))
    assert found == pytest.approx({"r0-0": -4 / 3, "r4-0": 8 / 3, "r8-0": -4 / 3})
    await traffic.post(Reward("r1", 5.0))
    found = advantages(await traffic.batch(group_size=3))
    assert found == {"r1-0": 5.0 - (0 + 4 + 0 + 5) / 4}, "it was opened among them, and its reward is late"


@pytest.mark.parametrize("task", ["t", None])
@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
async def test_no_tenant_changes_what_another_learns(traffic: Traffic, baseline: str, task: str | None) -> None:
    await of_key(traffic, "own", task, "b0", "b1")
    await of_key(traffic, "own", task, "a0", "a1")
    await traffic.rollouts(task, {"a0": 1e308, "b0": 0.0, "a1": -1e308, "b1": 1.0})
    settings = {"tasks_per_step": 2, "baseline": baseline, "compare": "step", "lone_rollouts": "running"}
    found = advantages(await traffic.batch(**settings))
    alone = {"grpo": 0.5 / (0.5**0.5 + 1e-4), "dr_grpo": 0.5, "rloo": 1.0, "reinforce_pp": 1.0}[baseline]
    assert found["b1-0"] == pytest.approx(alone, rel=1e-3) and found["b0-0"] == pytest.approx(-alone, rel=1e-3)
    assert abs(found["a0-0"]) <= 2e4, "older rewards are cut to the range"


async def test_a_rollout_that_is_compared_with_earlier_ones_takes_the_place_of_a_group(traffic: Traffic) -> None:
    await traffic.rollouts(None, {f"before-{i}": 0.0 for i in range(4)} | {"new": 1.0})
    assert await traffic.collector(lone_rollouts="running", tasks_per_step=6).next_batch(0) is None
    together = traffic.collector(lone_rollouts="running", tasks_per_step=5, compare="step")
    assert await together.next_batch(0) is None
    found = await traffic.collector(lone_rollouts="running", tasks_per_step=5).next_batch(0)
    assert advantages(found) == {"new-0": 0.8}


@pytest.mark.parametrize("task", ["t", None])
async def test_a_running_baseline_has_no_rewards_of_another_tenant(traffic: Traffic, task: str | None) -> None:
    await of_key(traffic, "own", task, *(f"a{i}" for i in range(6)))
    await of_key(traffic, "own", task, *(f"b{i}" for i in range(5)))
    await traffic.rollouts(task, {f"a{i}": 1000.0 * i for i in range(6)} | {f"b{i}": 0.0 for i in range(4)})
    await traffic.batch(lone_rollouts="running", group_timeout_s=1e-9, tasks_per_step=8)
    await traffic.rollout("b4", task, 1.0)
    found = await traffic.batch(lone_rollouts="running", group_timeout_s=1e-9)
    assert advantages(found) == {"b4-0": pytest.approx(0.8)}


async def test_a_group_of_absurd_advantages_is_left_out(traffic: Traffic, caplog: pytest.LogCaptureFixture) -> None:
    for name, reward in (("spoilt 0", 1.0), ("spoilt 1", -1.0), ("a", 1.0), ("b", 0.0)):
        await traffic.rollout(name, name[:6] if name.startswith("s") else "t", reward, reward_name=name[:6])
    settings: dict[str, Any] = {"reward_weights": {"spoilt": 1e300, "a": 1.0, "b": 1.0}, "tasks_per_step": 2}
    assert advantages(await traffic.batch(**settings)) == {"a-0": 0.5, "b-0": -0.5}
    (reason,) = set(await traffic.dropped("spoilt 0", "spoilt 1"))
    assert reason is not None and "not finite" in reason
    assert any("spoilt 0, spoilt 1" in line for line in caplog.messages)


async def fill(traffic: Traffic, count: int) -> None:
    """Write rollouts that wait for siblings, each in a task of its own."""
    rows = [{"id": f"w{i}", "task": f"task{i}"} for i in range(count)]
    of_rollouts = (
        "INSERT INTO rollouts (rollout_id, task_id, mode, status, created_at, ended_at, rewarded_at, calls) "
        "VALUES (:id, :task, 'train', 'completed', 1e9, 1e9, 1, 1)"
    )
    of_rewards = (
        "INSERT INTO rewards (rollout_id, name, value, final, evidence, created_at) VALUES (:id, 'reward', 0, 1, 1, 1)"
    )
    for begin in range(0, count, 5_000):  # a server gives one commit 5 s
        some = rows[begin : begin + 5_000]
        await traffic.store.database.commit([(of_rollouts, some), (of_rewards, some)])


async def test_a_look_reads_what_has_changed(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counter[str]()

    def counting(name: str, of: Any) -> Any:
        async def counted(*args: Any) -> Any:
            found = await of(*args)
            read.update(statements=1, rows=len(found) if isinstance(found, list) else 1)
            read["writes"] += name in ("commit", "write")
            return found

        return counted

    async def look(statements: int, rows: int, writes: int = 0) -> Batch | None:
        read.clear()
        found = await collector.next_batch(0)
        assert (read["statements"] <= statements, read["rows"] <= rows, read["writes"]) == (True, True, writes)
        return found

    config = TrainerConfig(**SMALL, group_timeout_s=1e10, reward_weights={"reward": 1.0, "style": 1.0})
    await traffic.store.rewards.use(Rules.of(config))
    await fill(traffic, 40_000)
    collector = Collector(config, traffic.store)
    assert await collector.next_batch(0) is None
    for name in ("all", "quick", "commit", "write"):
        monkeypatch.setattr(traffic.store.database, name, counting(name, getattr(traffic.store.database, name)))
    assert await look(5, 5) is None, "nothing has changed"
    await traffic.rollout("a", "t", 1.0)
    assert await look(12, 20) is None
    await traffic.rollout("b", "t", 0.0)
    assert advantages(await look(40, 60, writes=1)) == {"a-0": 0.5, "b-0": -0.5}, "the step is claimed"


async def test_a_trainer_that_missed_what_happened_looks_at_all_again(traffic: Traffic) -> None:
    collector = traffic.collector()
    assert await collector.next_batch(0) is None
    await traffic.rollouts("t", {"a": 1.0, "b": 0.0})
    await traffic.store.database.commit([("DELETE FROM feed WHERE n < (SELECT MAX(n) FROM feed)", [{}])])
    assert advantages(await collector.next_batch(0)) == {"a-0": 0.5, "b-0": -0.5}


async def test_deleted_rollouts_hold_up_no_trainer(traffic: Traffic) -> None:
    collector = traffic.collector(tasks_per_step=2, group_timeout_s=1e-9)
    await traffic.rollouts("t", {"a": 1.0, "b": 0.0})
    assert (await collector.waiting.totals())[0] == 2
    for name in ("a", "b"):
        await traffic.store.rollouts.delete(name)
    assert await collector.next_batch(0) is None


async def test_what_a_step_lacks_is_said_after_minutes(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = traffic.collector(**EIGHT)
    await traffic.rollout("untold", "t", None, status="completed")
    assert await collector.next_batch(0) is None and await collector.why_no_step() is None
    monkeypatch.setattr(collecting, "STANDS_S", -1.0)
    collector = traffic.collector(**EIGHT)
    assert await collector.why_no_step() == (
        "1 completed rollouts have no reward that counts (none came, or a reward function failed)"
    )
    await traffic.rollouts("a", halves("a"))
    await traffic.rollouts("b", halves("b", 5))
    assert await collector.next_batch(0) is None
    monkeypatch.setattr(groups, "STANDS_S", 0.0)
    assert await collector.why_no_step() == (
        "1 of the 2 groups for the next step are full (8 ended rollouts each); 1 more has begun, 3 rollouts short"
    )


async def test_rollouts_of_all_other_keys_and_of_none_share_their_groups(traffic: Traffic) -> None:
    await of_key(traffic, "all", "t", "a")
    await of_key(traffic, None, "t", "b")
    await traffic.rollouts("t", {"a": 1.0, "b": 0.0})
    assert advantages(await traffic.batch()) == {"a-0": 0.5, "b-0": -0.5}


async def test_older_rewards_count_as_the_nearer_end_of_the_range(traffic: Traffic) -> None:
    config = Config.model_validate({"rewards": {"range": [0, 1]}, "trainer": SMALL})
    await traffic.rollouts("t", {"a": 1e9, "b": -1e9})
    found = await Collector(config.trainer, traffic.store).next_batch(0)
    assert advantages(found) == {"a-0": 0.5, "b-0": -0.5}


# When a step may begin. Rounds: test_loop.py --------------------------------------------------------------------------


async def test_a_round_at_a_time_takes_what_waited_then(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, oldest, now, waits_for in (
        ("02:00", "2026-11-20 01:00", "2026-11-20 01:59:59", "Fri 02:00, 4 complete rollouts so far"),
        ("02:00", "2026-11-20 01:00", "2026-11-20 02:00", None),
        ("02:00", "2026-11-20 02:30", "2026-11-20 03:00", "Sat 02:00, 4 complete rollouts so far"),
        ("30 23 * * 1-5", "2026-11-20 08:00", "2026-11-20 23:00", "Fri 23:30, 4 complete rollouts so far"),
    ):
        waiting = AsyncMock()
        waiting.totals.return_value = 4, datetime.fromisoformat(oldest).timestamp()
        monkeypatch.setattr(time, "time", datetime.fromisoformat(now).timestamp)
        schedule = Schedule(ScheduleConfig(when="times", at=[times]), waiting)
        assert await schedule.waits_for() == waits_for, (times, now)


def test_a_wrong_schedule_is_named(tmp_path: Path) -> None:
    for schedule, what in (
        ("{when: times}", "needs schedule.at"),
        ('{when: times, at: ["25:00"]}', "'25:00' is neither a time of day"),
        ("{when: nightly}", "continuous"),
    ):
        (tmp_path / "c.yaml").write_text(f"trainer: {{schedule: {schedule}}}")
        with pytest.raises(ConfigError, match=f"trainer.schedule.*{what}"):
            load_config(tmp_path / "c.yaml")


SAT, SUN, MON = "2026-10-24", "2026-10-25", "2026-10-26"  # at 03:00 on Sunday it is 02:00 again


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=fold).timestamp()


@pytest.mark.usefixtures("in_berlin")
def test_a_time_of_day_counts_once_where_clocks_change() -> None:
    for text, now, last, following in (
        ("02:30", at(f"{SUN} 02:29"), at(f"{SAT} 02:30"), at(f"{SUN} 02:30")),
        ("02:30", at(f"{SUN} 02:10", 1), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("02:30", at(f"{SUN} 02:30", 1), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("03:00", at(f"{SUN} 02:59", 1), at(f"{SAT} 03:00"), at(f"{SUN} 03:00")),
        ("02:30", at("2026-11-20 02:30") + 0.5, at("2026-11-20 02:30"), at("2026-11-21 02:30")),
    ):
        times = ScheduleConfig(at=[text])
        assert (times.last_time(now), times.next_time(now)) == (last, following), (text, now)
