"""When a step may begin; times of day count once where clocks change. Rounds: test_loop.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from lightning_proxy.core.config.file import load_config
from lightning_proxy.core.config.trainer import ScheduleConfig
from lightning_proxy.core.errors import ConfigError
from lightning_proxy.trainer.collect.groups import Schedule


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
        ("02:30", at(f"{SUN} 02:30"), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("02:30", at(f"{SUN} 02:59"), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("02:30", at(f"{SUN} 02:10", 1), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("02:30", at(f"{SUN} 02:30", 1), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("02:30", at(f"{SUN} 02:45", 1), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("02:30", at(f"{SUN} 03:00"), at(f"{SUN} 02:30"), at(f"{MON} 02:30")),
        ("02:00", at(f"{SUN} 02:00", 1), at(f"{SUN} 02:00"), at(f"{MON} 02:00")),
        ("03:00", at(f"{SUN} 02:59", 1), at(f"{SAT} 03:00"), at(f"{SUN} 03:00")),
        ("02:30", at("2026-11-20 02:30") + 0.5, at("2026-11-20 02:30"), at("2026-11-21 02:30")),
    ):
        times = ScheduleConfig(at=[text])
        assert (times.last_time(now), times.next_time(now)) == (last, following), (text, now)
