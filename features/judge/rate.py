"""Shows rollouts one after another, and takes a person's reward for each rollout or its calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from rich.console import Console

from ...commands.api_client import ask
from ...commands.show.find import find
from ...commands.show.rollout_view import rollout_detail
from ...core.config.root import Config
from ...core.errors import ConfigError, LightningError

HUMAN = "human"
HELP = "+, - or a number, and a comment; `call 2 -` for a call; Enter: next; u: undo; q: quit"
_RATED = re.compile(r"(?:call (?P<seq>\d+) )?(?P<value>[+-]|[+-]?\d+(?:\.\d+)?)(?: (?P<comment>.*))?")
_THUMBS = {"+": 1.0, "-": -1.0}


def rate_rollouts(config: Config, ids: Sequence[str], person: str, limit: int) -> None:
    def request(method: str, path: str, **more: Any) -> Any:
        return ask(config, lambda api: api.request(method, path, **more))

    if not ids:
        wanted = {"person": person, "limit": str(limit)}
        ids = [one["rollout_id"] for one in request("GET", "/people/queue", params=wanted)["data"]]
    print(f"{len(ids)} rollouts to rate as {person}. {HELP}")
    given: list[tuple[int, str]] = []  # what may be taken back: the place in the queue, and the route
    at, shown, console = 0, -1, Console(highlight=False)
    while at < len(ids):
        if at != shown:
            rollout, shown = ask(config, partial(find, given=ids[at])), at
            console.print(rollout_detail(rollout, full=False))
        try:
            said = input(f"{at + 1}> ").strip()
        except EOFError:
            said = "q"
        if said == "q":
            break
        try:
            if not said:
                at += 1
            elif said == "u" and given:
                at, route = given.pop()
                request("DELETE", route)
            elif rated := _RATED.fullmatch(said):
                body = _body(rollout, rated, person)
                reward_id, of = request("POST", "/reward", body=body)["reward_id"], quote(body["rollout_id"], safe="")
                given.append((at, f"/rollouts/{of}/rewards/{reward_id}"))
                at += body["call_id"] is None
            else:
                print(HELP)
        except LightningError as error:
            print(error.message)
    print(f"recorded {len(given)} rewards named {HUMAN}")


def _body(rollout: dict[str, Any], rated: re.Match[str], person: str) -> dict[str, Any]:
    value, call_id = rated["value"], None
    if rated["seq"] is not None:
        call_id = next((call["call_id"] for call in rollout["calls"] if call["seq"] == int(rated["seq"])), None)
        if call_id is None:
            raise ConfigError(f"this rollout has no call {rated['seq']}")
    reward = _THUMBS[value] if value in _THUMBS else float(value)
    body = {"rollout_id": rollout["rollout_id"], "call_id": call_id, "reward": reward, "final": False}
    return body | {"name": HUMAN, "source": person, "comment": rated["comment"]}
