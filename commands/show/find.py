"""Finds rollouts and calls by the beginning of their ids."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar
from urllib.parse import quote

from ...core.errors import NotFound
from ..api_client import ApiClient, ApiError

T = TypeVar("T")

UNKNOWN = (400, 404)
SHOWN = 4
CUT = re.compile(r"(…|\.\.\.)$")
_MADE_BY_US = re.compile(r"[0-9a-f]{32}")
_NO_PATH = ("", ".", "..")  # with one of these a path would name another route


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
