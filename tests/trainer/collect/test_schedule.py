"""When a step may begin."""

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
from lightning_proxy.core.records import CallStart, Reward, RolloutName
from lightning_proxy.proxy.gateway.recorder import Recorder
from lightning_proxy.store.opening import opened
from lightning_proxy.store.store import Store
from lightning_proxy.trainer.collect.groups import Schedule, WaitingGroups
from support.sections import TrainerConfig


@pytest.mark.parametrize(
    ("at", "oldest", "now", "waits_for"),
    [
        ("02:00", "2026-11-20 01:00", "2026-11-20 01:59:59", "Fri 02:00, 4 complete rollouts so far"),
        ("02:00", "2026-11-20 01:00", "2026-11-20 02:00", None),
        ("02:00", "2026-11-20 01:00", "2026-11-20 09:00", None),  # a restart changes nothing
        ("02:00", "2026-11-20 02:30", "2026-11-20 03:00", "Sat 02:00, 4 complete rollouts so far"),
        ("30 23 * * 1-5", "2026-11-20 08:00", "2026-11-20 23:00", "Fri 23:30, 4 complete rollouts so far"),
        ("0 13 * * 6", "2026-11-21 12:59", "2026-11-21 13:00", None),
    ],
)
async def test_a_round_at_a_time_takes_what_waited_then(
    at: str, oldest: str, now: str, waits_for: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting:
        async def totals(self) -> tuple[int, float]:
            return 4, datetime.fromisoformat(oldest).timestamp()

    monkeypatch.setattr(time, "time", datetime.fromisoformat(now).timestamp)
    waiting: Any = Waiting()
    assert await Schedule(ScheduleConfig(when="times", at=[at]), waiting).waits_for() == waits_for


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        ("{when: times}", "needs schedule.at"),
        ('{when: times, at: ["25:00"]}', "'25:00' is neither a time of day"),
        ("{when: times, at: [tomorrow]}", "'tomorrow' is neither a time of day"),
        ("{when: nightly}", "continuous"),
    ],
)
def test_a_wrong_schedule_is_named(tmp_path: Path, schedule: str, what: str) -> None:
    (tmp_path / "c.yaml").write_text(f"trainer: {{schedule: {schedule}}}")
    with pytest.raises(ConfigError, match="trainer.schedule") as error:
        load_config(tmp_path / "c.yaml")
    assert what in error.value.message


async def test_a_round_begins_with_enough_rollouts_and_takes_all_that_waited_then(tmp_path: Path) -> None:
    async with opened(StoreConfig(url=f"sqlite:///{tmp_path}/s.db")) as database:
        store, config = Store(database), TrainerConfig.model_validate({})
        schedule = Schedule(ScheduleConfig(when="rollouts", every_rollouts=2), WaitingGroups(config, store))
        async with Recorder(store, merged=False) as recorder:
            for name in ("r1", "r2"):
                assert await schedule.waits_for() is not None
                start = CallStart(name, RolloutName(name, "task"), "chat/completions", "policy", 0, {}, time.time())
                await recorder.start(start)
                await store.rewards.post([Reward(name, 1.0)], None, b"")
        assert await schedule.waits_for() is None
        await store.steps.claim(["r1"], 0)
        assert await schedule.waits_for() is None, "r2 waited when the round began"
        await store.steps.claim(["r2"], 0)
        assert await schedule.waits_for() == "2 complete rollouts, 0 so far"
        assert schedule.round is None
