"""Times of day where clocks change: each counts once, and the next one is never in the past."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from lightning_proxy.core.config.trainer import ScheduleConfig

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).timestamp()


SAT, SUN, MON = "2026-10-24", "2026-10-25", "2026-10-26"  # at 03:00 on Sunday it is 02:00 again


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
