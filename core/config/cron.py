"""Times of day (`02:00`) and cron expressions (`0 2 * * 1-5`), in local time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from cronsim import CronSim, CronSimError


def expression(text: str) -> str:
    """Return the cron expression of a time of day or a cron expression; raise ValueError if it is neither."""
    day = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip())
    cron = f"{int(day[2])} {int(day[1])} * * *" if day else text
    try:
        next(CronSim(cron, datetime.now()))
    except (CronSimError, StopIteration):
        raise ValueError(f"{text!r} is neither a time of day (02:00) nor a cron expression (0 2 * * 1-5)") from None
    return cron


def last_time(times: Sequence[str], now: float) -> float | None:
    """Return the last of these times up to `now` (both Unix time); None if there was none for many years."""
    last = (next((t for t in _times(text, now, reverse=True) if t <= now), None) for text in times)
    return max((moment for moment in last if moment is not None), default=None)


def next_time(times: Sequence[str], now: float) -> float:
    """Return the next of these times after `now` (both Unix time)."""
    return min(next(t for t in _times(text, now) if t > now) for text in times)


def _times(text: str, now: float, *, reverse: bool = False) -> Iterator[float]:
    """The times from hours before `now` on, by the clock on the wall: an hour that comes twice counts once, first."""
    begin = datetime.fromtimestamp(now + 4 * 3600 if reverse else now - 4 * 3600)
    return (moment.timestamp() for moment in CronSim(expression(text), begin, reverse=reverse))
