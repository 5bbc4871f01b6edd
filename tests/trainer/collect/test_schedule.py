"""When a step may begin: each policy by hand, and the facts that a real store gives it."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.server import StoreConfig
from lightning_proxy.core.config.trainer import ScheduleConfig
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.core.records import CallEnd, CallStart, Choice, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.collector import Collector
from lightning_proxy.trainer.collect.schedule import Schedule, idle, rollouts, times
from support.sections import TrainerConfig


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_a_round_of_rollouts_begins_with_enough_and_takes_all_that_waited_then() -> None:
    config = ScheduleConfig(when="rollouts", every_rollouts=10)
    assert rollouts(config, (9, 1.0), None) == "10 complete rollouts, 9 so far"
    assert rollouts(config, (10, 1.0), None) is None
    assert rollouts(config, (3, 40.0), 50.0) is None
    assert rollouts(config, (3, 60.0), 50.0) is not None, "those came later"


def test_a_round_at_a_time_of_day_takes_what_waited_then_also_after_a_restart() -> None:
    config, four = ScheduleConfig(when="times", at=["02:00"]), (4, at("2026-11-20 01:00"))
    assert times(config, four, at("2026-11-20 01:59:59")) == "Fri 02:00, 4 complete rollouts so far"
    assert times(config, four, at("2026-11-20 02:00:00")) is None
    assert times(config, four, at("2026-11-20 09:00")) is None
    later = 4, at("2026-11-20 02:30")
    assert times(config, later, at("2026-11-20 03:00")) == "Sat 02:00, 4 complete rollouts so far"
    assert times(config, (0, None), at("2026-11-20 03:00")) is not None, "nothing waits"


def test_cron_expressions_are_times_too() -> None:
    config = ScheduleConfig(when="times", at=["0 13 * * 6", "30 23 * * 1-5"])
    friday = times(config, (1, at("2026-11-20 08:00")), at("2026-11-20 23:00"))
    assert friday == "Fri 23:30, 1 complete rollouts so far"
    assert times(config, (1, at("2026-11-21 12:59")), at("2026-11-21 13:00")) is None


def test_the_machine_is_idle_without_calls_and_without_other_programs() -> None:
    config = ScheduleConfig(when="idle", idle_s=60.0, max_load=0.5)
    assert idle(config, 50.0, 0.0) == "60 s without a call, 50 so far"
    assert idle(config, 60.0, 0.2) is None
    assert idle(config, None, 0.2) is None, "nobody ever called"
    assert "now 90%" in str(idle(config, 60.0, 0.9))
    assert "not measured" in str(idle(config, 60.0, None))


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        ("{when: times}", "needs schedule.at"),
        ('{when: times, at: ["25:00"]}', "'25:00' is neither a time of day"),
        ("{when: times, at: [tomorrow]}", "'tomorrow' is neither a time of day"),
        ("{when: nightly}", "continuous"),
        ("{max_load: 2}", "less than or equal to 1"),
    ],
)
def test_a_wrong_schedule_is_named(tmp_path: Path, schedule: str, what: str) -> None:
    (tmp_path / "c.yaml").write_text(f"trainer: {{schedule: {schedule}}}")
    with pytest.raises(ConfigError, match="trainer.schedule") as error:
        load_config(tmp_path / "c.yaml")
    assert what in error.value.message


class Traffic:
    """A store with what agents do to it, and the schedule that looks at it."""

    def __init__(self, database: Any, **schedule: Any) -> None:
        self.store = Store(database)
        config = TrainerConfig.model_validate({"schedule": schedule})
        self.schedule = Schedule(config.schedule, Collector(config, self.store), self.store)

    async def begin(self, recorder: Recorder, name: str, started: float) -> None:
        request = {"messages": [{"role": "user", "content": name}]}
        rollout = RolloutName(name, "task")
        await recorder.start(CallStart(name, rollout, "chat/completions", "policy", 0, request, started))

    async def end(self, recorder: Recorder, name: str) -> None:
        await recorder.end(CallEnd(name, name, "ok", {}, 200, (1, 2), (Choice(0, (3,), (-1.0,), "stop"),)))


async def test_rollouts_are_counted_until_a_step_takes_them(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")) as database:
        traffic = Traffic(database, when="rollouts", every_rollouts=2)
        async with Recorder(traffic.store, merged=False) as recorder:
            for name, reward in (("r1", 0.0), ("r2", 1.0), ("unrewarded", None)):
                assert await traffic.schedule.waits_for() is not None
                await traffic.begin(recorder, name, time.time())
                await traffic.end(recorder, name)
                if reward is not None:
                    await traffic.store.rewards.post([Reward(name, reward)], None, b"")
                if name == "r2":
                    break
        assert await traffic.schedule.waits_for() is None
        await traffic.store.steps.claim(["r1"], 0)
        assert await traffic.schedule.waits_for() is None, "r2 waited when the round began"
        await traffic.store.steps.claim(["r2"], 0)
        assert await traffic.schedule.waits_for() == "2 complete rollouts, 0 so far"
        assert traffic.schedule.round is None


async def test_the_load_of_others_is_a_share_and_takes_two_looks_to_measure(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")) as database:
        traffic = Traffic(database, when="idle", idle_s=0.01, max_load=1.0)
        assert "not measured yet" in str(await traffic.schedule.waits_for())
        time.sleep(0.1)
        assert await traffic.schedule.waits_for() is None


async def test_a_call_under_way_is_no_idleness_however_long_it_takes(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")) as database:
        traffic = Traffic(database, when="idle", idle_s=0.2, max_load=1.0)
        traffic.schedule._load = lambda: 0.0  # type: ignore[method-assign]
        assert await traffic.schedule.waits_for() is None
        async with Recorder(traffic.store, merged=False) as recorder:
            await traffic.begin(recorder, "slow", time.time() - 100)
            assert "without a call" in str(await traffic.schedule.waits_for())
            await traffic.end(recorder, "slow")
            assert "without a call" in str(await traffic.schedule.waits_for()), "it was seen under way just now"
            while await traffic.schedule.waits_for() is not None:
                time.sleep(0.02)
            await traffic.begin(recorder, "killed", time.time() - 5000)
            assert await traffic.schedule.waits_for() is None, "its proxy was killed long ago"
            await traffic.begin(recorder, "new", time.time())
            assert "without a call" in str(await traffic.schedule.waits_for())
