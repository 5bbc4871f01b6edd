"""Rows of the store to the records of `types.py`, and back. Pure."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from ..json_text import dumps_or_none, loads, loads_or_none
from ..types import CallEnd, Choice, ModelCall, PolicyVersion, Reward, Rollout, ToolCall
from .delta import grow_request, pack_floats, pack_ids, unpack_floats, unpack_ids


def call_end_row(end: CallEnd, prompt_shared: int, merged: bool) -> dict[str, Any]:
    """Parameters of `sql.CALL_END`; the first `prompt_shared` prompt tokens are those of the parent's row."""
    first = end.choices[0] if end.choices else Choice(0)
    more = [[c.index, c.token_ids, c.logprobs, c.finish_reason] for c in end.choices[1:]]
    return {
        "call_id": end.call_id,
        "rollout_id": end.rollout_id,
        "status": end.status,
        "http_status": end.http_status,
        "response": dumps_or_none(end.response),
        "merged": merged,
        "prompt_shared": prompt_shared,
        "prompt_ids": pack_ids(end.prompt_token_ids[prompt_shared:]),
        "token_ids": pack_ids(first.token_ids),
        "logprobs": pack_floats(first.logprobs),
        "finish_reason": first.finish_reason,
        "more_choices": dumps_or_none(more) if more else None,
        "usage": dumps_or_none(end.usage),
        "error": end.error,
        "untrainable_reason": end.untrainable_reason,
        "ttft_ms": end.ttft_ms,
        "latency_ms": end.latency_ms,
        "fallback": end.fallback,
        "model": end.model,
        "tokens": sum(len(c.token_ids) for c in end.choices),
    }


def read_calls(
    calls: Iterable[sqlite3.Row],
    tool_calls: Iterable[sqlite3.Row],
    rewards: dict[str, float],
    log: Sequence[sqlite3.Row],
) -> list[ModelCall]:
    """A rollout's calls, in order of `seq`, so that a call's parent comes before it. `log`: `sql.POLICY_LOG_DURING`."""
    tools: dict[str, list[ToolCall]] = {}
    for row in tool_calls:
        tools.setdefault(row["call_id"], []).append(_read_tool_call(row))
    done: dict[str, ModelCall] = {}
    for row in calls:
        done[row["call_id"]] = _read_call(row, done, tools, rewards, log)
    return list(done.values())


def _read_call(
    row: sqlite3.Row,
    earlier: dict[str, ModelCall],
    tools: dict[str, list[ToolCall]],
    rewards: dict[str, float],
    log: Sequence[sqlite3.Row],
) -> ModelCall:
    parent = earlier.get(row["parent_id"])
    before = parent.row_token_ids if parent else ()
    prompt = before[: row["prompt_shared"]] + unpack_ids(row["prompt_ids"])
    call_id = row["call_id"]
    return ModelCall(
        call_id=call_id,
        rollout_id=row["rollout_id"],
        seq=row["seq"],
        agent=row["agent"],
        endpoint=row["endpoint"],
        status=row["status"],
        model=row["model"],
        policy_version=row["policy_version"],
        policy_versions=_versions(row, log),
        request=grow_request(
            _stored_request(row["request"] or row["large_request"]), parent.request if parent else None
        ),
        response=loads_or_none(row["response"]),
        prompt_token_ids=prompt,
        choices=_read_choices(row),
        extends=_extended(prompt, parent, earlier),
        usage=loads_or_none(row["usage"]),
        tool_calls=tuple(tools.get(call_id, ())),
        reward=rewards.get(call_id),
        trainable=(reason := _untrainable_reason(row)) is None,
        untrainable_reason=reason,
        error=row["error"],
        http_status=row["http_status"],
        started_at=row["started_at"],
        ttft_ms=row["ttft_ms"],
        latency_ms=row["latency_ms"],
        superseded_by=row["superseded_by"],
        upstream=row["upstream"],
    )


def _stored_request(text: str) -> dict[str, Any]:
    """One as deep as a parser takes them is a level too deep inside of what it is stored in."""
    try:
        stored: dict[str, Any] = loads(text)
        return stored
    except ValueError:
        return {"new": loads(text.removeprefix('{"new":')[:-1])}


def _extended(prompt: tuple[int, ...], parent: ModelCall | None, earlier: dict[str, ModelCall]) -> str | None:
    """The call whose row of tokens the prompt begins with: mostly its parent, else the newest such call."""
    for call in (*([parent] if parent else ()), *reversed(earlier.values())):
        row = call.row_token_ids
        if row and call.choices and prompt[: len(row)] == row:
            return call.call_id
    return None


def _untrainable_reason(row: sqlite3.Row) -> str | None:
    if row["superseded_by"] is not None:
        return "the client sent the same request again"
    if row["untrainable_reason"] is None and row["status"] != "ok":
        return f"call {row['status']}"
    reason: str | None = row["untrainable_reason"]
    return reason


def _versions(row: sqlite3.Row, log: Sequence[sqlite3.Row]) -> tuple[int, ...]:
    """The version at the start, those that went live while the call ran, and the one at its end."""
    first, last = row["policy_version"], row["policy_version_end"]
    if first is None or last is None:
        return () if first is None else (first,)
    ended = row["started_at"] + (row["latency_ms"] or 0.0) / 1000
    between = [entry["version"] for entry in log if row["started_at"] <= entry["at"] <= ended]
    return tuple(dict.fromkeys([first, *between, last]))


def _read_choices(row: sqlite3.Row) -> tuple[Choice, ...]:
    if row["token_ids"] is None:
        return ()
    first = Choice(0, unpack_ids(row["token_ids"]), unpack_floats(row["logprobs"]), row["finish_reason"])
    more = (
        Choice(index, tuple(ids), tuple(lps), reason)
        for index, ids, lps, reason in loads_or_none(row["more_choices"]) or ()
    )
    return (first, *more)


def _read_tool_call(row: sqlite3.Row) -> ToolCall:
    is_error = None if row["is_error"] is None else bool(row["is_error"])
    return ToolCall(row["tool_call_id"], row["name"], row["arguments"], loads_or_none(row["result"]), is_error)


def call_rewards(rewards: Sequence[Reward]) -> dict[str, float]:
    """The newest reward named `reward` of each call."""
    return {r.call_id: r.value for r in rewards if r.call_id is not None and r.name == "reward"}


def read_rollout(row: sqlite3.Row) -> Rollout:
    fields = ("rollout_id", "task_id", "agent", "mode", "status", "reason", "policy_version", "step", "dropped")
    numbers = ("created_at", "ended_at", "calls", "tokens", "reward", "dropped_by")
    return Rollout(metadata=loads_or_none(row["metadata"]), **{name: row[name] for name in fields + numbers})


def read_reward(row: sqlite3.Row) -> Reward:
    fields = ("rollout_id", "value", "call_id", "name", "source", "comment", "reward_id", "created_at")
    return Reward(final=bool(row["final"]), **{name: row[name] for name in fields})


def read_version(row: sqlite3.Row) -> PolicyVersion:
    fields = ("version", "status", "publish", "path", "served_model", "step", "created_at", "live_at", "error")
    named = {name: row[name] for name in fields}
    adapters, metrics = loads(row["adapters"]), loads_or_none(row["metrics"])
    return PolicyVersion(verified=bool(row["verified"]), adapters=adapters, metrics=metrics, **named)
