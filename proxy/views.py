"""Records as the JSON of the control API. Contract, section 3. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_proxy.proxy.ledger import Collapse, Step
from lightning_proxy.proxy.types import ModelCall, PolicyVersion, Reward, Rollout, ToolCall, Transition

# What of a request the model is shown, in any of the recorded APIs.
_SHOWN = ("system", "instructions", "messages", "prompt", "input", "previous_response_id", "tools")


def rollout_view(rollout: Rollout) -> dict[str, Any]:
    return asdict(rollout)


def rollout_detail(rollout: Rollout, calls: Sequence[ModelCall], rewards: Sequence[Reward]) -> dict[str, Any]:
    """A rollout with its calls in order and every reward ever posted for it."""
    return rollout_view(rollout) | {
        "call_count": rollout.calls,
        "calls": [call_view(call) for call in calls],
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


def transitions(rollout: Rollout, calls: Sequence[ModelCall]) -> list[Transition]:
    """The rollout as a Markov decision process: one transition a call, one a tool call whose result came back.

    State: what the model was shown. Action: its whole answer. The last call's transition carries the rollout's reward.
    A request that the client sent again counts once: as the last of its calls.
    """
    answered = [call for call in calls if call.status == "ok" and call.superseded_by is None]
    found: list[Transition] = []
    for i, call in enumerate(answered):
        last = i + 1 == len(answered)
        reward = (call.reward or 0.0) + ((rollout.reward or 0.0) if last else 0.0)
        following = None if last else _state(answered[i + 1])
        ends = last and rollout.status != "running"
        action = {
            "message": message_of(call),
            "token_ids": call.response_token_ids,
            "finish_reason": call.finish_reason,
        }
        found.append(
            Transition(len(found), "llm", call.agent, call.call_id, _state(call), action, reward, following, ends)
        )
        for tool in call.tool_calls:
            if tool.result is not None:
                found.append(_tool_transition(len(found), call, tool))
    return found


def message_of(call: ModelCall) -> Any:
    """The answer: the first choice's message (chat), its text (completions), or the whole response of another API."""
    response = call.response if isinstance(call.response, dict) else {}
    choices = response.get("choices") or [{}]
    first = choices[0] if isinstance(choices[0], dict) else {}
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
