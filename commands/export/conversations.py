"""Makes rows for supervised fine-tuning of a rollout's calls: one for each conversation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...core.records import ModelCall, Rollout
from ...core.redact import REASON
from ...proxy.api.views import beside_calls, call_view
from ...proxy.dialects.transcript import ChatTurn, Digested, beginnings, read

Json = dict[str, Any]
REJECTED = "another attempt was used in place of its last answer"


def conversations(rollout: Rollout, calls: Sequence[ModelCall], left_out: Counter[str]) -> Iterator[Json]:
    """Yield a row for each conversation of a rollout; count in `left_out` those that cannot be one, by reason."""
    beside = zip(calls, beside_calls(calls), strict=True)
    rejected = {call.call_id for call, one in beside if one.get("rejected")}
    for call, turn in whole(answered(calls), left_out):
        if call.call_id in rejected:
            left_out[REJECTED] += 1
            continue
        yield {
            "messages": turn.messages,
            "tools": turn.tools or None,
            "rollout_id": rollout.rollout_id,
            "task_id": rollout.task_id,
            "mode": rollout.mode,
            "status": rollout.status,
            "reward": rollout.reward,
            "agent": call.agent,
            "model": call.model,
        }


def answered(calls: Sequence[ModelCall]) -> list[tuple[ModelCall, ChatTurn]]:
    """Return the calls that were answered, each as chat."""
    turns = read([*map(call_view, calls)])
    return [
        (call, turn) for call, turn in zip(calls, turns, strict=True) if call.is_decision and call.response is not None
    ]


def whole(turns: Sequence[tuple[ModelCall, ChatTurn]], left_out: Counter[str]) -> Iterator[tuple[ModelCall, ChatTurn]]:
    """Yield the last turn of each conversation; count in `left_out` those that cannot be shown, by reason."""
    for i in ends([turn for _, turn in turns]):
        call, turn = turns[i]
        if reason := REASON if call.untrainable_reason == REASON else turn.unreadable:
            left_out[reason] += 1
        else:
            yield call, turn


def ends(turns: Sequence[ChatTurn]) -> list[int]:
    """Return the places of the answered turns that no later turn continues or repeats."""
    digested, latest = Digested(), dict[int, int]()
    lasts: list[int] = []
    for i, turn in enumerate(turns):
        digests = [*beginnings(turn.messages, digested)]
        latest.update(dict.fromkeys(digests, i))
        lasts.append(digests[-1])
    return [i for i, (turn, last) in enumerate(zip(turns, lasts, strict=True)) if turn.answer and latest[last] == i]
