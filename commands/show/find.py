"""Finds rollouts: by filters, page by page, or by the beginning of their ids."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

from ...core.errors import ConfigError, NotFound
from ...core.records import check_id
from ..api_client import ApiClient, ApiError

T = TypeVar("T")

UNKNOWN = (400, 404)
SHOWN = 4
CUT = re.compile(r"(…|\.\.\.)$")
PAGE = 1000
MOST_PAGES = 20  # that are asked for; each looks at a bounded number of rollouts
_MADE_BY_US = re.compile(r"[0-9a-f]{32}")
_NO_PATH = (".", "..")  # with one of these a path would name another route


async def with_id(api: ApiClient, given: str, work: Callable[[str], Awaitable[T]], *, changes: bool = False) -> T:
    """Do `work` on the rollout with this id, or else on the only rollout with an id that begins with it.

    `given` may end in `…`. If it does not, work that `changes` a rollout accepts a shortened id only if the proxy made
    the id, so that another rollout is not changed because the intended one is gone.
    """
    start, refusal = check_id(CUT.sub("", given), "a rollout's id"), None
    if given == start and given not in _NO_PATH:
        try:
            return await work(given)
        except ApiError as error:
            if error.status_code not in UNKNOWN:
                raise
            refusal = error
    ids = [rollout["rollout_id"] for rollout in (await api.rollouts(prefix=start, limit=SHOWN + 1))["data"]]
    if changes and refusal is not None:
        ids = [rollout_id for rollout_id in ids if _MADE_BY_US.fullmatch(rollout_id)]
        if not ids:
            raise refusal
    if not ids:
        raise NotFound(f"no rollout {given!r}, and no id begins with it")
    if len(ids) > 1:
        few = ", ".join(ids[:SHOWN]) + (", …" if len(ids) > SHOWN else "")
        raise NotFound(f"no rollout {given!r}; several ids begin with it: {few}")
    return await work(ids[0])


async def find(api: ApiClient, given: str) -> dict[str, Any]:
    """Return the rollout with this id, or else the only rollout with an id that begins with it."""
    return await with_id(api, given, api.rollout)


async def collect(api: ApiClient, filters: dict[str, Any], limit: int) -> tuple[list[dict[str, Any]], str | None]:
    """Return at most `limit` of the newest matching rollouts, and the API's cursor for more (None at the end)."""
    rollouts: list[dict[str, Any]] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await api.rollouts(**filters, limit=min(PAGE, limit - len(rollouts)), cursor=cursor)
        rollouts += page["data"]
        cursor = page["next_cursor"]
        if cursor is None or len(rollouts) >= limit:
            break
    return rollouts, cursor


def since_of(text: str | None) -> float | None:
    """Return the Unix time that `--since` means: a local date, a date with time, or a time ago (90m, 12h, 7d)."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d+)([mhd])", text):
        return time.time() - int(ago[1]) * {"m": 60, "h": 3600, "d": 86400}[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(
            f"--since must be a date, a date with time, or an age such as 90m or 7d; got {text!r}"
        ) from None
