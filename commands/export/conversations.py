"""A rollout's conversations: as rows for supervised fine-tuning, and as trajectories in Harbor's format (ATIF). Pure.

The specification of ATIF: https://harborframework.com/docs/trajectory-format
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ...core.records import ModelCall, Rollout
from ...core.redact import REASON
from ...proxy.api.views import call_fields, call_view
from ...proxy.dialects.transcript import ChatTurn, beginnings, chat_turns

Json = dict[str, Any]
REJECTED = "another attempt was used in place of its last answer"
VERSION = "ATIF-v1.6"
SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
ROLES = {"system": "system", "user": "user", "agent": "assistant"}
OURS = ("task_id", "mode", "status", "reward")  # of the rollout, in `extra`
MEDIA = "images and files are not written as ATIF"


def conversations(rollout: Rollout, calls: Sequence[ModelCall], left_out: Counter[str]) -> Iterator[Json]:
    """Yield a row for each conversation of a rollout; count in `left_out` those that cannot be one, by reason."""
    rejected = {call.call_id for call, fields in zip(calls, call_fields(calls), strict=True) if fields.get("rejected")}
    for call, turn in _whole(_answered(calls), left_out):
        if call.call_id in rejected:
            left_out[REJECTED] += 1
            continue
        facts = {name: getattr(rollout, name) for name in ("rollout_id", *OURS)}
        yield {
            "messages": turn.messages,
            "tools": turn.tools or None,
            **facts,
            "agent": call.agent,
            "model": call.model,
        }


def _answered(calls: Sequence[ModelCall]) -> list[tuple[ModelCall, ChatTurn]]:
    """The calls that were answered, each as chat."""
    turns = zip(calls, chat_turns([*map(call_view, calls)]), strict=True)
    return [(call, turn) for call, turn in turns if call.is_decision and call.response is not None]


def _whole(turns: Sequence[tuple[ModelCall, ChatTurn]], left_out: Counter[str]) -> Iterator[tuple[ModelCall, ChatTurn]]:
    """Yield the last turn of each conversation, which no later one continues or repeats."""
    latest, lasts = dict[int, int](), list[int]()
    for i, (_, turn) in enumerate(turns):
        digests = [*beginnings(turn.messages)]
        latest |= dict.fromkeys(digests, i)
        lasts.append(digests[-1])
    for i, (call, turn) in enumerate(turns):
        if not turn.answer or latest[lasts[i]] != i:
            continue
        if reason := REASON if call.untrainable_reason == REASON else turn.unreadable:
            left_out[reason] += 1
        else:
            yield call, turn


def trajectories(rollout: Rollout, calls: Sequence[ModelCall], left_out: Counter[str]) -> Iterator[Json]:
    """Yield a document for each conversation of a rollout; count in `left_out` those that cannot be one, by reason."""
    turns = _answered(calls)
    by_end = {[*beginnings(turn.messages)][-1]: call for call, turn in turns}
    for last, turn in _whole(turns, left_out):
        if not all(_is_text(message.get("content")) for message in turn.messages):
            left_out[MEDIA] += 1
            continue
        steps = _steps(turn.messages, [by_end.get(end) for end in beginnings(turn.messages)][1:])
        agent: Json = {"name": last.agent or "agent", "version": "unknown", "model_name": last.model or "unknown"}
        yield {
            "schema_version": VERSION,
            "session_id": rollout.rollout_id,
            "agent": agent | ({"tool_definitions": turn.tools} if turn.tools else {}),
            "steps": steps,
            "final_metrics": {"total_steps": len(steps)},
            "extra": {name: value for name in OURS if (value := getattr(rollout, name)) is not None},
        }


def _steps(messages: Sequence[Json], made: Sequence[ModelCall | None]) -> list[Json]:
    """The messages as steps: results of tools belong to the step that called them. `made`: the call of each answer."""
    steps: list[Json] = []
    for message, call in zip(messages, made, strict=True):
        content = message.get("content") or ""
        if message["role"] == "tool" and steps:
            called = [one["tool_call_id"] for one in steps[-1].get("tool_calls", ())]
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            if not isinstance(name := message.get("tool_call_id"), str):  # of the first call without a result
                taken = {one["source_call_id"] for one in results}
                name = next((one for one in called if one not in taken), None)
            results.append({"source_call_id": name if name in called else None, "content": content})
            continue
        steps.append({"step_id": len(steps) + 1, "source": SOURCES.get(message["role"], "user"), "message": content})
        if message["role"] == "assistant":
            steps[-1] |= _of_agent(message, len(steps)) | (_of_call(call) if call is not None else {})
    return steps


def _of_agent(message: Json, step: int) -> Json:
    """The thoughts and tool calls of an answer. The format wants an id of each call: one without gets its place."""
    made, tools = Json(), []
    for i, tool in enumerate(message.get("tool_calls") or ()):
        given, own = tool["function"].get("arguments"), tool.get("id")
        tools.append({
            "tool_call_id": own if own and isinstance(own, str) else f"call_{step}_{i}",
            "function_name": tool["function"]["name"],
            "arguments": given if isinstance(given, dict) else {"arguments": given},
        })  # fmt: skip
    if thoughts := message.get("reasoning_content"):
        made["reasoning_content"] = thoughts
    return made | ({"tool_calls": tools} if tools else {})


def _of_call(call: ModelCall) -> Json:
    prompt, sampled = call.prompt_token_ids, call.response_token_ids
    metrics = {
        "prompt_tokens": len(prompt), "completion_tokens": len(sampled),
        "prompt_token_ids": prompt, "completion_token_ids": sampled, "logprobs": call.logprobs,
    }  # fmt: skip
    return {
        "timestamp": datetime.fromtimestamp(call.started_at, UTC).isoformat(),
        "model_name": call.model,
        **({"metrics": metrics} if sampled else {}),
        "extra": {"call_id": call.call_id, "policy_version": call.policy_version, "reward": call.reward},
    }


def conversation_of(row: Mapping[str, Any]) -> Json:
    """Return a trajectory as a line of `import`; ValueError if it is none. Copied context is not learned from."""
    try:
        extra = row.get("extra") or {}
        return {
            "messages": [message for step in row["steps"] for message in _messages(step)],
            "tools": row["agent"].get("tool_definitions"),
            "model": row["agent"].get("model_name"),
            **{name: extra[name] for name in OURS if name in extra},
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no trajectory: {type(error).__name__} {str(error)[:200]}") from None


def _messages(step: Json) -> Iterator[Json]:
    if not _is_text(step.get("message")):
        raise ValueError(f"step {step['step_id']} has more than text")
    message: Json = {"role": ROLES[step["source"]], "content": step.get("message") or ""}
    if thoughts := step.get("reasoning_content"):
        message["reasoning_content"] = thoughts
    if called := step.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": tool.get("tool_call_id"),
                "function": {"name": tool["function_name"], "arguments": tool.get("arguments")},
            }
            for tool in called
        ]
    if step.get("is_copied_context"):
        message["weight"] = 0
    yield message
    for result in (step.get("observation") or {}).get("results", ()):
        if (content := result.get("content")) is not None:
            name = result.get("source_call_id")  # None: of what the agent did without a tool
            yield ({"role": "tool", "tool_call_id": name} if name else {"role": "user"}) | {"content": content}


def _is_text(content: Any) -> bool:
    """Whether a message has nothing but text; ATIF and chat have the same parts for that."""
    parts = content if isinstance(content, list) else []
    return isinstance(content, str | list | None) and all(part.get("type") == "text" for part in parts)
