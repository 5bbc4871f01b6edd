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
SHOWN = 4
CUT = re.compile(r"(…|\.\.\.)$")
_MADE_BY_US = re.compile(r"[0-9a-f]{32}")
_NO_PATH = ("", ".", "..")  # with one of these a path would name another route

SORTS = ("newest", "reward", "tokens", "calls")
SORTED = 1000  # of the newest that fit
PAGE = 1000
MOST_PAGES = 20  # that are asked for; each looks at a bounded number of rollouts


async def with_id(api: ApiClient, given: str, work: Callable[[str], Awaitable[T]], *, changes: bool = False) -> T:
    """Do `work` with the rollout of this id; if there is none, with the only one whose id begins so. `…` may end it.

    What `changes` a rollout needs its full id, unless it is one that the proxy made, or `…` ends it: a rollout of
    another name must not be changed because the one that was meant is gone.
    """
    if given not in _NO_PATH and not CUT.search(given):
        try:
            return await work(given)
        except ApiError as error:
            if error.status_code not in UNKNOWN:
                raise
            return await work(await _beginning(api, given, error, only_ours=changes))
    return await work(await _beginning(api, given, None))


async def find(api: ApiClient, given: str) -> dict[str, Any]:
    """Return the rollout with this id, or else the only one whose id begins so."""
    return await with_id(api, given, lambda rollout_id: api.rollout(quote(rollout_id, safe="")))


async def credited(api: ApiClient, given: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the rollout that `find` finds, and the credit of its calls if a step took it."""
    rollout = await find(api, given)
    if rollout["step"] is None:
        return rollout, []
    rows = await api.request("GET", f"/rollouts/{quote(rollout['rollout_id'], safe='')}/rows")
    return rollout, rows["calls"]


def only_one(given: str, ids: Iterable[str], kind: str) -> str:
    """Return the one of these ids that begins so; raise NotFound if it is none or several."""
    found = list(ids)
    if len(found) == 1:
        return found[0]
    few = ", ".join(found[:SHOWN]) + (", …" if len(found) > SHOWN else "")
    what = f"several ids begin with it: {few}" if found else "and no id begins with it"
    raise NotFound(f"no {kind} {given!r}{';' if found else ''} {what}")


async def _beginning(api: ApiClient, given: str, error: ApiError | None, *, only_ours: bool = False) -> str:
    start = CUT.sub("", given)
    found: list[str] = []
    if start:
        try:
            page = await api.rollouts(prefix=start, limit=SHOWN + 1)
        except ApiError as refused:
            if refused.status_code != 422:  # what begins no id
                raise
            page = {"data": []}
        found = [rollout["rollout_id"] for rollout in page["data"]]
    if only_ours and error is not None:
        found = [rollout_id for rollout_id in found if _MADE_BY_US.fullmatch(rollout_id)]
        if not found:
            raise error
    return only_one(given, found, "rollout")


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
        column = "created_at" if sort == "newest" else sort
        found.sort(key=lambda rollout: (rollout[column] is not None, rollout[column] or 0.0), reverse=not reverse)
    return found[:limit], cursor


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
