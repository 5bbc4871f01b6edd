"""Times of day (`02:00`) and cron expressions (`0 2 * * 1-5`), in local time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from cronsim import CronSim, CronSimError


def expression(text: str) -> str:
    """The cron expression that `text` is or stands for; ValueError if it is neither."""
    day = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip())
    found = f"{int(day[2])} {int(day[1])} * * *" if day else text
    try:
        next(CronSim(found, datetime.now()))
    except (CronSimError, StopIteration):
        raise ValueError(f"{text!r} is no time of day (02:00) and no cron expression (0 2 * * 1-5)") from None
    return found


def last_time(times: Sequence[str], now: float) -> float | None:
    """The last of these times that is not after `now` (both Unix time); None if there was none in many years."""
    here = datetime.fromtimestamp(int(now) + 1)  # cronsim looks for what is before that
    found = (next(CronSim(expression(text), here, reverse=True), None) for text in times)
    return max((moment.timestamp() for moment in found if moment is not None), default=None)


def next_time(times: Sequence[str], now: float) -> float:
    """The next of these times after `now`."""
    here = datetime.fromtimestamp(now)
    return min(next(CronSim(expression(text), here)).timestamp() for text in times)
