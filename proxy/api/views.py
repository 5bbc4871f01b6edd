"""Turns records into the control API's JSON, where its fields differ from the record's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ...core.on_board import modules
from ...core.records import Event, ModelCall, PolicyVersion, Reward, Rollout
from ...store.reports import CallWithCredit
from .answers import Call

_OF_CALL = tuple(name for name in Call.model_fields if name != "choices")


def record_view(record: Any) -> dict[str, Any]:
    """Return a record's fields by name. Unlike `asdict` it copies nothing in them: they may be megabytes."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def rollout_detail(
    rollout: Rollout, calls: Sequence[ModelCall], rewards: Sequence[Reward], events: Sequence[Event] = ()
) -> dict[str, Any]:
    """Return a rollout with its calls and events in order and every reward ever posted for it."""
    return record_view(rollout) | {
        "call_count": rollout.calls,
        "calls": [call_view(call) | more for call, more in zip(calls, beside_calls(calls), strict=True)],
        "events": [record_view(event) for event in events],
        "rewards": [reward_view(reward) for reward in rewards],
    }


def beside_calls(calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
    """Return what side rooms say of each of a rollout's calls, which are all of it, in order."""
    found: list[dict[str, Any]] = [{} for _ in calls]
    for module in modules("calls"):
        for fields_of_call, more in zip(found, module.fields(calls), strict=True):
            fields_of_call.update(more)
    return found


def call_view(call: ModelCall) -> dict[str, Any]:
    """Return a call without its rollout. It has `choices` only if there are several."""
    view = {name: getattr(call, name) for name in _OF_CALL}
    view["tool_calls"] = [asdict(tool) for tool in call.tool_calls]
    if len(call.choices) > 1:
        view["choices"] = [asdict(choice) for choice in call.choices]
    return view


def reward_view(reward: Reward) -> dict[str, Any]:
    """Return a reward as JSON; its value has the name `reward`."""
    view = record_view(reward)
    view["reward"] = view.pop("value")
    del view["retrain"]
    return view


def credit_view(call: CallWithCredit) -> dict[str, Any]:
    """Return how a call was trained as JSON; its return has the name `return`."""
    view = record_view(call)
    view["return"] = view.pop("returned")
    return view


def version_view(version: PolicyVersion, live: int, obstacle: str | None = None) -> dict[str, Any]:
    """Return a policy version, whether it is the live one, and whether it can be made live: if not, the `obstacle`."""
    facts = {"live": version.version == live, "promotable": obstacle is None, "obstacle": obstacle}
    return record_view(version) | facts
