"""Turns a rollout into the transitions of a Markov decision process. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ...core.records import Event, ModelCall, Rollout, ToolCall, Transition
from ...core.tools import dicts
from .decisions import among_decisions

# What of a request the model is shown, in any of the recorded APIs.
_SHOWN = ("system", "instructions", "messages", "prompt", "input", "previous_response_id", "tools")


def transitions(rollout: Rollout, calls: Sequence[ModelCall], events: Sequence[Event] = ()) -> list[Transition]:
    """Return one transition for each call, and one for each tool call whose result came back.

    A state is what the model was shown, an action its entire answer. The last call's transition carries the rollout's
    own reward. A request that the client sent again counts once: as the last of its calls. An action that the agent
    posted is a tool transition without a call; its state is the one that the same agent posted last.

    Of short calls (`ModelCall.request_of`) the states are short, too.
    """
    answered = among_decisions(calls)
    following = {call.call_id: after for call, after in pairwise(answered)}
    made: list[Transition] = []
    states: dict[str | None, Any] = {}
    steps: list[Event | ModelCall] = [*events, *answered]
    for step in sorted(steps, key=lambda step: (step.seq, isinstance(step, ModelCall))):
        if isinstance(step, ModelCall):
            made += _call_transitions(len(made), step, following.get(step.call_id), rollout)
        elif step.kind == "state":
            states[step.agent] = step.value
        elif step.kind == "action":
            made.append(_action_transition(len(made), step, states.get(step.agent)))
    if made and rollout.status != "running":
        made[-1] = replace(made[-1], done=True)
    return made


def _call_transitions(t: int, call: ModelCall, after: ModelCall | None, rollout: Rollout) -> list[Transition]:
    reward = (call.reward or 0.0) + (0.0 if after else rollout.own_reward or 0.0)
    action = {"message": message_of(call), "token_ids": call.response_token_ids, "finish_reason": call.finish_reason}
    following = _state(after) if after else None
    own = Transition(t, "llm", call.agent, call.call_id, _state(call), action, reward, following, False)
    with_results = [tool for tool in call.tool_calls if tool.result is not None]
    return [own, *(_tool_transition(t + 1 + i, call, tool) for i, tool in enumerate(with_results))]


def _action_transition(t: int, event: Event, state: Any) -> Transition:
    action = {"id": None, "name": event.name, "arguments": event.arguments}
    observation = {"result": event.result, "is_error": event.is_error}
    return Transition(t, "tool", event.agent, None, state, action, 0.0, observation, False)


def message_of(call: ModelCall) -> Any:
    """Return the answer: the first choice's message (chat), its text (completions), or another API's response."""
    return answer_in(call.response)


def answer_in(response: Any) -> Any:
    """Return what `message_of` returns, of a response."""
    fields = response if isinstance(response, dict) else {}
    first = next(iter(dicts(fields.get("choices"))), {})
    return first.get("message", first.get("text", response))


def _state(call: ModelCall) -> dict[str, Any]:
    shown = {key: call.request[key] for key in _SHOWN if key in call.request}
    shared = {key: n for key, n in (call.request_of or {}).items() if key in ("call_id", *_SHOWN)}
    state = shown | {"prompt_token_ids": call.prompt_token_ids}
    state |= {"request_of": shared} if len(shared) > 1 else {}
    return state | ({"prompt_of": call.prompt_of} if call.prompt_of else {})


def _tool_transition(t: int, call: ModelCall, tool: ToolCall) -> Transition:
    action = {"id": tool.id, "name": tool.name, "arguments": tool.arguments}
    observation = {"result": tool.result, "is_error": tool.is_error}
    return Transition(t, "tool", call.agent, call.call_id, message_of(call), action, 0.0, observation, False)
