"""Collects the rollouts that `rollouts list` shows: page by page, in the requested order."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from ...core.errors import ConfigError
from ..api_client import ApiClient

SORTS = ("newest", "reward", "tokens", "calls")
SORTED = 1000  # of the newest that fit
PAGE = 1000
MOST_PAGES = 20  # that are asked for; each looks at a bounded number of rollouts


async def collect(
    api: ApiClient, filters: dict[str, Any], limit: int, sort: str = "newest", *, reverse: bool = False
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rollouts, and the cursor of those that follow (None: there are no more).

    Any order but the newest first is that of the newest 1,000 that fit.
    """
    if sort not in SORTS:
        raise ConfigError(f"--sort is {', '.join(SORTS[:-1])} or {SORTS[-1]}, got {sort!r}")
    ordered = sort != "newest" or reverse
    wanted, cursor = SORTED if ordered else limit, filters.pop("cursor", None)
    found: list[dict[str, Any]] = []
    for _ in range(MOST_PAGES):
        page = await api.rollouts(**filters, limit=min(PAGE, wanted - len(found)), cursor=cursor)
        found += page["data"]
        cursor = page["next_cursor"]
        if cursor is None or len(found) >= wanted:
            break
    if ordered:
        found.sort(key=lambda rollout: _rank(rollout, sort), reverse=not reverse)
    return found[:limit], cursor


def _rank(rollout: dict[str, Any], sort: str) -> tuple[bool, float]:
    value = rollout["created_at" if sort == "newest" else sort]
    return value is not None, value if value is not None else 0.0


def checked(mode: str | None, status: str | None) -> None:
    """Raise ConfigError if there is no such mode or status."""
    for option, value, known in (
        ("--mode", mode, ("train", "eval")),
        ("--status", status, ("running", "completed", "failed", "discarded")),
    ):
        if value is not None and value not in known:
            raise ConfigError(f"{option} is {', '.join(known[:-1])} or {known[-1]}, got {value!r}")


def since_of(text: str | None) -> float | None:
    """Return the Unix time of `--since`; None without one."""
    return None if text is None else since(text, time.time())


def since(text: str, now: float) -> float:
    """Return the Unix time of a local date, a date with time, or a time ago: 90m, 12h, 7d."""
    if ago := re.fullmatch(r"(\d+)([mhd])", text):
        return now - int(ago[1]) * {"m": 60, "h": 3600, "d": 86400}[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"--since is a date, a date with time, or 90m, 12h, 7d; got {text!r}") from None
