"""Records as the JSON of the control API. Contract, section 3. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from ..apis.tools import dicts
from ..store.training import Collapse, Step
from ..types import Event, ModelCall, PolicyVersion, Reward, Rollout, ToolCall, Transition

# What of a request the model is shown, in any of the recorded APIs.
_SHOWN = ("system", "instructions", "messages", "prompt", "input", "previous_response_id", "tools")


def rollout_view(rollout: Rollout) -> dict[str, Any]:
    return asdict(rollout)


def rollout_detail(
    rollout: Rollout, calls: Sequence[ModelCall], rewards: Sequence[Reward], events: Sequence[Event] = ()
) -> dict[str, Any]:
    """A rollout with its calls and events in order and every reward ever posted for it."""
    return rollout_view(rollout) | {
        "call_count": rollout.calls,
        "calls": [call_view(call) for call in calls],
        "events": [asdict(event) for event in events],
        "rewards": [reward_view(reward) for reward in rewards],
    }


def call_view(call: ModelCall) -> dict[str, Any]:
    view = {
        "call_id": call.call_id,
        "seq": call.seq,
        "agent": call.agent,
        "endpoint": call.endpoint,
        "status": call.status,
        "http_status": call.http_status,
        "error": call.error,
        "upstream": call.upstream,
        "model": call.model,
        "policy_version": call.policy_version,
        "policy_versions": call.policy_versions,
        "request": call.request,
        "response": call.response,
        "prompt_token_ids": call.prompt_token_ids,
        "response_token_ids": call.response_token_ids,
        "logprobs": call.logprobs,
        "finish_reason": call.finish_reason,
        "sampling": call.sampling,
        "extends": call.extends,
        "usage": call.usage,
        "tool_calls": [asdict(tool) for tool in call.tool_calls],
        "reward": call.reward,
        "trainable": call.trainable,
        "untrainable_reason": call.untrainable_reason,
        "superseded_by": call.superseded_by,
        "started_at": call.started_at,
        "ttft_ms": call.ttft_ms,
        "latency_ms": call.latency_ms,
    }
    if len(call.choices) > 1:
        view["choices"] = [asdict(choice) for choice in call.choices]
    return view


def reward_view(reward: Reward) -> dict[str, Any]:
    view = asdict(reward)
    view["reward"] = view.pop("value")
    del view["retrain"]
    return view


def version_view(version: PolicyVersion, live: int) -> dict[str, Any]:
    return asdict(version) | {"live": version.version == live}


def step_view(step: Step) -> dict[str, Any]:
    return asdict(step)


def collapse_view(collapse: Collapse | None) -> dict[str, Any] | None:
    return asdict(collapse) if collapse else None


def transitions(rollout: Rollout, calls: Sequence[ModelCall], events: Sequence[Event] = ()) -> list[Transition]:
    """The rollout as a Markov decision process: one transition a call, one a tool call whose result came back.

    State: what the model was shown. Action: its whole answer. The last call's transition carries the rollout's reward.
    A request that the client sent again counts once: as the last of its calls. An action that the agent told of is a
    tool transition without a call; its state is the one that the same agent told of last.
    """
    answered = [call for call in calls if call.is_decision]
    following = {call.call_id: after for call, after in pairwise(answered)}
    found: list[Transition] = []
    states: dict[str | None, Any] = {}
    steps: list[Event | ModelCall] = [*events, *answered]
    for step in sorted(steps, key=lambda step: (step.seq, isinstance(step, ModelCall))):
        if isinstance(step, ModelCall):
            found += _call_transitions(len(found), step, following.get(step.call_id), rollout)
        elif step.kind == "state":
            states[step.agent] = step.value
        elif step.kind == "action":
            found.append(_action_transition(len(found), step, states.get(step.agent)))
    if found and rollout.status != "running":
        found[-1] = replace(found[-1], done=True)
    return found


def _call_transitions(t: int, call: ModelCall, after: ModelCall | None, rollout: Rollout) -> list[Transition]:
    reward = (call.reward or 0.0) + (0.0 if after else rollout.reward or 0.0)
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
    """The answer: the first choice's message (chat), its text (completions), or the whole response of another API."""
    response = call.response if isinstance(call.response, dict) else {}
    first = next(iter(dicts(response.get("choices"))), {})
    return first.get("message", first.get("text", call.response))


def _state(call: ModelCall) -> dict[str, Any]:
    shown = {key: call.request[key] for key in _SHOWN if key in call.request}
    return shown | {"prompt_token_ids": call.prompt_token_ids}


def _tool_transition(t: int, call: ModelCall, tool: ToolCall) -> Transition:
    action = {"id": tool.id, "name": tool.name, "arguments": tool.arguments}
    observation = {"result": tool.result, "is_error": tool.is_error}
    return Transition(t, "tool", call.agent, call.call_id, message_of(call), action, 0.0, observation, False)


def transition_view(transition: Transition) -> dict[str, Any]:
    return asdict(transition)
