"""Makes short calls full again, as the control API gives them. Pure.

`request_of: {"call_id": C, NAME: n, …}` says of each field NAME that it begins as the first n of call C's full field:
items of a list, characters (Unicode code points) of a text, members of an object. What the request itself has in the
field comes after that. `prompt_of: {"call_id": C, "tokens": n}` says that the prompt begins with the first n of call
C's tokens, prompt and answer. Without them, or where they are null, nothing is shared. C is an earlier call of the same
answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

Json = dict[str, Any]


def full_calls(calls: Iterable[Json], *, prompts: bool = True) -> list[Json]:
    """Return a rollout's calls with full requests, which share their messages in memory.

    Without `prompts` these stay short: all of them in full take much memory.
    """
    requests, tokens, found = dict[str, Json](), dict[str, list[int]](), []
    for call in calls:
        request = requests[call["call_id"]] = dict(call["request"])
        of = call.get("request_of") or {}
        for name in of.keys() - {"call_id"}:
            request[name] = begun(requests[of["call_id"]][name], of[name], request[name])
        full = call | {"request": request, "request_of": None}
        if prompts:
            of = call.get("prompt_of")
            prompt = [*(tokens[of["call_id"]][: of["tokens"]] if of else ()), *call["prompt_token_ids"]]
            tokens[call["call_id"]] = [*prompt, *call["response_token_ids"]]
            full |= {"prompt_token_ids": prompt, "prompt_of": None}
        found.append(full)
    return found


def begun(before: Any, shared: int, own: Any) -> Any:
    """Return the first so many of an earlier field, followed by this one."""
    return dict(islice(before.items(), shared)) | own if isinstance(before, dict) else before[:shared] + own
