"""Makes short calls and transitions full again, as the control API gives them. Pure.

`request_of: {"call_id": C, NAME: n, …}` says of each field NAME that it begins as the first n of call C's full field:
items of a list, characters (Unicode code points) of a text, members of an object. What the request itself has in the
field comes after that. `prompt_of: {"call_id": C, "tokens": n}` says that the prompt begins with the first n of call
C's tokens, prompt and answer. Without them, or where they are null, nothing is shared. C is an earlier call of the same
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

Json = dict[str, Any]


def full_calls(calls: Iterable[Json], *, prompts: bool = True) -> list[Json]:
    """Return a rollout's calls with full requests, which share their messages in memory.

    Without `prompts` these stay short: all of them in full take much memory.
    """
    requests, rows, found = _Requests(), _Rows(), []
    for call in calls:
        full = call | {"request": requests.full(call["call_id"], call["request"], call.get("request_of"))}
        full["request_of"] = None
        if prompts:
            prompt = rows.prompt(call["prompt_token_ids"], call.get("prompt_of"))
            rows.add(call["call_id"], prompt, call["response_token_ids"])
            full |= {"prompt_token_ids": prompt, "prompt_of": None}
        found.append(full)
    return found


def full_transitions(transitions: Iterable[Json]) -> list[Json]:
    """Return a rollout's transitions with full states."""
    requests, rows, found = _Requests(), _Rows(), []

    def full(call_id: str | None, state: Json) -> Json:
        own = dict(state)
        request_of, prompt_of = own.pop("request_of", None), own.pop("prompt_of", None)
        own["prompt_token_ids"] = rows.prompt(own["prompt_token_ids"], prompt_of)
        return requests.full(call_id, own, request_of)

    for transition in transitions:
        states = {}
        if transition["kind"] == "llm":
            call_id, following = transition["call_id"], transition["next_state"]
            states["state"] = full(call_id, transition["state"])
            rows.add(call_id, states["state"]["prompt_token_ids"], transition["action"]["token_ids"])
            states["next_state"] = following and full(None, following)
        found.append(transition | states)
    return found


class _Requests:
    """The full requests of the calls so far, by call."""

    def __init__(self) -> None:
        self._full: dict[str | None, Json] = {}

    def full(self, call_id: str | None, own: Json, of: Json | None) -> Json:
        full = dict(own)
        for name, shared in (of or {}).items():
            if of and name != "call_id":
                full[name] = begun(self._full[of["call_id"]][name], shared, own[name])
        self._full[call_id] = full
        return full


class _Rows:
    """The tokens of the calls so far, prompt and answer, by call."""

    def __init__(self) -> None:
        self._tokens: dict[str, Sequence[int]] = {}

    def prompt(self, own: Sequence[int], of: Json | None) -> list[int]:
        return [*(self._tokens[of["call_id"]][: of["tokens"]] if of else ()), *own]

    def add(self, call_id: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._tokens[call_id] = [*prompt, *answer]


def begun(before: Any, shared: int, own: Any) -> Any:
    """Return the first so many of an earlier field, followed by this one."""
    return dict(islice(before.items(), shared)) | own if isinstance(before, dict) else before[:shared] + own
