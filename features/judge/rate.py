"""Shows rollouts one after the other, and takes a person's reward for each, or for its calls."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args
from urllib.parse import quote

from rich.console import Console

from ...commands.api_client import ApiClient, ApiError, ask
from ...commands.show.find import find
from ...commands.show.rollout_view import rollout_detail
from ...core.config.root import Config
from ...core.errors import ConfigError
from .table import HUMAN, Order

HELP = "+, - or a number, and a comment; `call 2 -` for a call; Enter: next; u: undo; q: quit"
_RATED = re.compile(r"(?:call (?P<seq>\d+) )?(?P<value>[+-]|[+-]?\d+(?:\.\d+)?)(?: (?P<comment>.*))?")
_THUMBS = {"+": 1.0, "-": -1.0}


class MayTakeBack(NamedTuple):
    """A reward that may be taken back, and the place of its rollout in the queue."""

    rollout_id: str
    reward_id: int
    at: int


def rate_rollouts(config: Config, ids: Sequence[str], order: str, person: str, limit: int) -> None:
    """Ask about each rollout until the queue, or the input, ends."""
    if order not in get_args(Order):
        raise ConfigError(f"--order is {', '.join(get_args(Order))}, got {order!r}")
    ask(config, lambda api: _rate(api, ids, {"order": order, "person": person, "limit": str(limit)}))


async def _rate(api: ApiClient, ids: Sequence[str], wanted: dict[str, str]) -> None:
    console, given, at = Console(highlight=False), list[MayTakeBack](), 0
    if not ids:
        queue = await api.request("GET", "/people/queue", params=wanted)
        ids = [one["rollout_id"] for one in queue["data"]]
    print(f"{len(ids)} to rate as {wanted['person']}. {HELP}")
    while at < len(ids):
        rollout = await find(api, ids[at])
        console.print(rollout_detail(rollout, full=False))
        at = await _answered(api, rollout, given, at, wanted["person"])
    print(f"{len(given)} rewards named {HUMAN}")


async def _answered(api: ApiClient, rollout: dict[str, Any], given: list[MayTakeBack], at: int, person: str) -> int:
    """Return the place of the next rollout: what a person says of this one."""
    while True:
        try:
            said = (await read_line(f"{at + 1}> ")).strip()
        except EOFError:
            said = "q"
        if said == "q":
            return 10**9
        if not said:
            return at + 1
        try:
            if said == "u" and given:
                last = given.pop()
                await api.request("DELETE", f"/rollouts/{quote(last.rollout_id, safe='')}/rewards/{last.reward_id}")
                return last.at
            if (rated := _RATED.fullmatch(said)) is None:
                print(HELP)
                continue
            body = _body(rollout, rated, person)
            posted = await api.request("POST", "/reward", body)
        except (ApiError, ConfigError) as error:
            print(error.message)
            continue
        given.append(MayTakeBack(rollout["rollout_id"], posted["reward_id"], at))
        if body["call_id"] is None:
            return at + 1


async def read_line(prompt: str) -> str:
    """Return what a person types. Raise EOFError. At a terminal no thread waits, for which Ctrl-C would wait, too."""
    if not sys.stdin.isatty():
        return await asyncio.to_thread(input, prompt)
    print(prompt, end="", flush=True)
    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin)
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line


def _body(rollout: dict[str, Any], rated: re.Match[str], person: str) -> dict[str, Any]:
    value, call_id = rated["value"], None
    if rated["seq"] is not None:
        call_id = next((call["call_id"] for call in rollout["calls"] if call["seq"] == int(rated["seq"])), None)
        if call_id is None:
            raise ConfigError(f"it has no call {rated['seq']}")
    reward = _THUMBS[value] if value in _THUMBS else float(value)
    body = {"rollout_id": rollout["rollout_id"], "call_id": call_id, "reward": reward, "final": False}
    return body | {"name": HUMAN, "source": person, "comment": rated["comment"]}
