"""Finds rollouts: by filters, page by page, or by the beginning of their ids."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote

from ...core.errors import ConfigError, NotFound
from ..api_client import ApiClient, ApiError

T = TypeVar("T")

UNKNOWN = (400, 404)
NO_ID = 422  # of what begins no id
SHOWN = 4
CUT = re.compile(r"(…|\.\.\.)$")
_MADE_BY_US = re.compile(r"[0-9a-f]{32}")
_NO_PATH = ("", ".", "..")  # with one of these a path would name another route

PAGE = 1000  # also of the newest that are sorted
MOST_PAGES = 20  # that are asked for; each looks at a bounded number of rollouts


async def with_id(api: ApiClient, given: str, work: Callable[[str], Awaitable[T]], *, changes: bool = False) -> T:
    """Do `work` with the rollout of this id; if there is none, with the only one whose id begins so. `…` may end it.

    What `changes` a rollout needs its full id, unless it is one that the proxy made, or `…` ends it: a rollout of
    another name must not be changed because the one that was meant is gone.
    """
    start, refusal, ids = CUT.sub("", given), None, list[str]()
    if given == start and given not in _NO_PATH:
        try:
            return await work(given)
        except ApiError as error:
            if error.status_code not in UNKNOWN:
                raise
            refusal = error
    if start:
        try:
            ids = [rollout["rollout_id"] for rollout in (await api.rollouts(prefix=start, limit=SHOWN + 1))["data"]]
        except ApiError as error:
            if error.status_code != NO_ID:
                raise
    if changes and refusal is not None:
        ids = [rollout_id for rollout_id in ids if _MADE_BY_US.fullmatch(rollout_id)]
        if not ids:
            raise refusal
    return await work(only_one(given, ids, "rollout"))


async def find(api: ApiClient, given: str) -> dict[str, Any]:
    """Return the rollout with this id, or else the only one whose id begins so."""
    return await with_id(api, given, lambda rollout_id: api.rollout(quote(rollout_id, safe="")))


def only_one(given: str, ids: Iterable[str], kind: str) -> str:
    """Return the one of these ids that begins so; raise NotFound if it is none or several."""
    known = list(ids)
    if len(known) == 1:
        return known[0]
    if not known:
        raise NotFound(f"no {kind} {given!r} and no id begins with it")
    few = ", ".join(known[:SHOWN]) + (", …" if len(known) > SHOWN else "")
    raise NotFound(f"no {kind} {given!r}; several ids begin with it: {few}")


async def collect(
    api: ApiClient, filters: dict[str, Any], limit: int, sort: str = "newest"
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rollouts, and the API's cursor of those that follow (None: there are no more).

    Any order but the newest first is that of the newest 1,000 that fit.
    """
    wanted, cursor = limit if sort == "newest" else PAGE, None
    rollouts: list[dict[str, Any]] = []
    for _ in range(MOST_PAGES):
        page = await api.rollouts(**filters, limit=min(PAGE, wanted - len(rollouts)), cursor=cursor)
        rollouts += page["data"]
        cursor = page["next_cursor"]
        if cursor is None or len(rollouts) >= wanted:
            break
    if sort != "newest":
        rollouts.sort(key=lambda rollout: (rollout[sort] is not None, rollout[sort] or 0.0), reverse=True)
    return rollouts[:limit], cursor


def since_of(text: str | None) -> float | None:
    """Return the Unix time of `--since`: a local date, a date with time, or a time ago (90m, 12h, 7d)."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d+)([mhd])", text):
        return time.time() - int(ago[1]) * {"m": 60, "h": 3600, "d": 86400}[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"--since is a date, a date with time, or 90m, 12h, 7d; got {text!r}") from None
