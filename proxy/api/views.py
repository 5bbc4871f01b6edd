"""Turns records into the control API's JSON, where the fields of the two differ. These are pure functions.

`transitions` turns a rollout into transitions of a Markov decision process. `among_decisions` drops calls that are not
decisions, and copies what later calls share with them. `words_in` finds the first words of question and answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from ...core.config.section import feature_sections
from ...core.json_text import fields_of, loads_or_none
from ...core.records import CallFields, Choice, Event, ModelCall, Reward, Rollout, ToolCall, Transition
from ...core.tools import dicts, tool_calls
from ...store.requests import begun
from ..dialects.transcript import messages_answered, messages_in, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallFields):
    """A call. `request` and `prompt_token_ids` continue what `request_of` and `prompt_of` name, if these are set.

    `request_of`: what the request takes from the full request of the earlier call `call_id`: for each field named here,
    its first n list items, Unicode code points or object members. `prompt_of`: the prompt begins with the first
    `tokens` tokens (prompt and answer) of the call `call_id`.
    """

    response_token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    sampling: dict[str, Any]
    choices: list[Choice] | None = None


_OF_CALL = tuple(field.name for field in fields(Call))

# The fields of a request that the model is shown, in any of the recorded APIs.
_SHOWN = ("system", "instructions", "messages", "prompt", "input", "previous_response_id", "tools")

Fields = dict[str, Any]

WORDS = 200  # characters


def rollout_detail(
    rollout: Rollout, calls: Sequence[ModelCall], rewards: Sequence[Reward], events: Sequence[Event] = ()
) -> dict[str, Any]:
    """Return a rollout with its calls and events in order and every reward ever posted for it."""
    return fields_of(rollout) | {
        "call_count": rollout.calls,
        "calls": [call_view(call) | more for call, more in zip(calls, call_fields(calls), strict=True)],
        "events": [*map(fields_of, events)],
        "rewards": [{name: of for name, of in fields_of(one).items() if name != "retrain"} for one in rewards],
    }


def call_fields(calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
    """Return the fields that features add to each call. `calls`: all of a rollout's calls, in order."""
    made: list[dict[str, Any]] = [{} for _ in calls]
    for feature in feature_sections().values():
        for own, more in zip(made, feature.call_fields(calls), strict=True):
            own.update(more)
    return made


def call_view(call: ModelCall) -> dict[str, Any]:
    """Return a call without its rollout id. It has `choices` only if there are several."""
    return {name: getattr(call, name) for name in _OF_CALL if name != "choices" or len(call.choices) > 1}


def transitions(rollout: Rollout, calls: Sequence[ModelCall], events: Sequence[Event] = ()) -> list[Transition]:
    """Return one transition for each call that is a decision, and for each tool call with a result.

    A state is what the model was shown, an action its entire answer. The last call's transition carries the rollout's
    own reward. A request that the client repeated counts once, as its last call. An action that the agent
    posted is a tool transition without a call; its state is the last one that this agent posted before.

    Short calls (`ModelCall.request_of`) have short states.
    """
    answered = among_decisions(calls)
    following = {call.call_id: after for call, after in pairwise(answered)}
    made, states = list[Transition](), dict[str | None, Any]()

    def add(step: ModelCall | Event, call_id: str | None, state: Any, tool: ToolCall | Event) -> None:
        action = {"id": getattr(tool, "id", None), "name": tool.name, "arguments": tool.arguments}
        after = {"result": tool.result, "is_error": tool.is_error}
        made.append(Transition(len(made), "tool", step.agent, call_id, state, action, 0.0, after, False))

    steps: list[Event | ModelCall] = [*events, *answered]
    for step in sorted(steps, key=lambda step: (step.seq, isinstance(step, ModelCall))):
        if isinstance(step, ModelCall):
            after, message = following.get(step.call_id), answer_in(step.response)
            reward = (step.reward or 0.0) + (0.0 if after else rollout.own_reward or 0.0)
            action = {"message": message, "token_ids": step.response_token_ids, "finish_reason": step.finish_reason}
            made.append(Transition(
                len(made), "llm", step.agent, step.call_id, _state(step), action, reward,
                _state(after) if after else None, False,
            ))  # fmt: skip
            for tool in step.tool_calls:
                if tool.result is not None:
                    add(step, step.call_id, message, tool)
        elif step.kind == "state":
            states[step.agent] = step.value
        elif step.kind == "action":
            add(step, None, states.get(step.agent), step)
    if made and rollout.status != "running":
        made[-1] = replace(made[-1], done=True)
    return made


def answer_in(response: Any) -> Any:
    """Return the answer: the first choice's message (chat), its text (completions), or another API's response."""
    fields = response if isinstance(response, dict) else {}
    first = next(iter(dicts(fields.get("choices"))), {})
    return first.get("message", first.get("text", response))


def _state(call: ModelCall) -> dict[str, Any]:
    shown = {key: call.request[key] for key in _SHOWN if key in call.request}
    shared = {key: n for key, n in (call.request_of or {}).items() if key in ("call_id", *_SHOWN)}
    state = shown | {"prompt_token_ids": call.prompt_token_ids}
    state |= {"request_of": shared} if len(shared) > 1 else {}
    return state | ({"prompt_of": call.prompt_of} if call.prompt_of else {})


def among_decisions(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls that are decisions, rewritten so that short ones refer only to other decisions."""
    left_out = {call.call_id: call for call in calls if not call.is_decision}
    return [_shortened(call, left_out) for call in calls if call.is_decision]


def _shortened(call: ModelCall, left_out: dict[str, ModelCall]) -> ModelCall:
    while call.request_of and (parent := left_out.get(call.request_of["call_id"])):
        request, of = _rebased(call.request, call.request_of, parent.request, parent.request_of)
        call = replace(call, request=request, request_of=of)
    while call.prompt_of and (parent := left_out.get(call.prompt_of["call_id"])):
        own, before = {"tokens": call.prompt_token_ids}, {"tokens": parent.row_token_ids}
        prompt, of = _rebased(own, call.prompt_of, before, parent.prompt_of)
        call = replace(call, prompt_token_ids=prompt["tokens"], prompt_of=of)
    return call


def _rebased(own: Fields, of: Fields, parents: Fields, parents_of: Fields | None) -> tuple[Fields, Fields | None]:
    """A short call's fields and reference, changed to refer to its parent's parent instead of its parent."""
    own, before, shared = dict(own), parents_of or {}, dict[str, Any]()
    for name, count in of.items():
        if name == "call_id":
            continue
        most = before.get(name, 0)
        if count > most:
            own[name] = begun(parents[name], count - most, own[name])
        if most:
            shared[name] = min(count, most)
    return own, {"call_id": before["call_id"], **shared} if shared else None


def words_in(request: str | None, response: str | None) -> tuple[str | None, str | None]:
    """Return the first words of a request's question and of an answer, both given as stored JSON; None if empty."""
    stored, answered = loads_or_none(request), loads_or_none(response)
    shown = messages_in(stored["new"]) if isinstance(stored, dict) and isinstance(stored.get("new"), dict) else []
    asked = [message for message in shown if message.get("role") == "user"] or shown or [{}]
    answer = "\n".join(filter(None, map(text, messages_answered(answered)))) if isinstance(answered, dict) else ""
    if tools := tool_calls(answered):
        answer += f" {', '.join(tool.name for tool in tools)}(…)"
    return _first_words(text(asked[-1])), _first_words(answer)


def _first_words(words: str) -> str | None:
    return " ".join(words[: 4 * WORDS].split())[:WORDS] or None
