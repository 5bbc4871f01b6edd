"""Leaves out calls that are no decisions, and moves text that others share with them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...core.records import ModelCall
from ...store.requests import begun

Of = dict[str, Any] | None


def among_decisions(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls that are decisions. Short ones share nothing but with each other then."""
    left_out = {call.call_id: call for call in calls if not call.is_decision}
    return [_shortened(call, left_out) for call in calls if call.is_decision]


def _shortened(call: ModelCall, left_out: dict[str, ModelCall]) -> ModelCall:
    while call.request_of and (parent := left_out.get(call.request_of["call_id"])):
        request, request_of = _request(call, parent)
        call = replace(call, request=request, request_of=request_of)
    while call.prompt_of and (parent := left_out.get(call.prompt_of["call_id"])):
        prompt, prompt_of = _prompt(call, call.prompt_of["tokens"], parent)
        call = replace(call, prompt_token_ids=prompt, prompt_of=prompt_of)
    return call


def _request(call: ModelCall, parent: ModelCall) -> tuple[dict[str, Any], Of]:
    """The request as its difference from the request that its parent is stored against."""
    request, before, shared = dict(call.request), parent.request_of or {}, {}
    for name, count in (call.request_of or {}).items():
        if name == "call_id":
            continue
        most = before.get(name, 0)
        if count > most:
            request[name] = begun(parent.request[name], count - most, call.request[name])
        if most:
            shared[name] = min(count, most)
    return request, {"call_id": before["call_id"], **shared} if shared else None


def _prompt(call: ModelCall, count: int, parent: ModelCall) -> tuple[tuple[int, ...], Of]:
    most = parent.prompt_of["tokens"] if parent.prompt_of else 0
    prompt = parent.row_token_ids[: max(0, count - most)] + call.prompt_token_ids
    return prompt, parent.prompt_of and parent.prompt_of | {"tokens": min(count, most)}
