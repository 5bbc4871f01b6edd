"""Records as the JSON of the control API, where that has other fields than the record. Contract, section 3. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..types import Event, ModelCall, PolicyVersion, Reward, Rollout
from .answers import Call

_OF_CALL = tuple(name for name in Call.model_fields if name != "choices")


def rollout_detail(
    rollout: Rollout, calls: Sequence[ModelCall], rewards: Sequence[Reward], events: Sequence[Event] = ()
) -> dict[str, Any]:
    """A rollout with its calls and events in order and every reward ever posted for it."""
    return asdict(rollout) | {
        "call_count": rollout.calls,
        "calls": [call_view(call) for call in calls],
        "events": [asdict(event) for event in events],
        "rewards": [reward_view(reward) for reward in rewards],
    }


def call_view(call: ModelCall) -> dict[str, Any]:
    """A call without its rollout; its `choices` only where it has several."""
    view = {name: getattr(call, name) for name in _OF_CALL}
    view["tool_calls"] = [asdict(tool) for tool in call.tool_calls]
    if len(call.choices) > 1:
        view["choices"] = [asdict(choice) for choice in call.choices]
    return view


def reward_view(reward: Reward) -> dict[str, Any]:
    """A reward, whose value is called `reward`."""
    view = asdict(reward)
    view["reward"] = view.pop("value")
    del view["retrain"]
    return view


def version_view(version: PolicyVersion, live: int) -> dict[str, Any]:
    """A policy version, and whether it is the live one."""
    return asdict(version) | {"live": version.version == live}
