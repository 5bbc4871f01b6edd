"""Automatic intermediate rewarding (AIR): rewards calls for events that the proxy saw.

Agent Lightning (arXiv 2508.03680), section 3.3, takes such rewards from what a system reports about itself anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable

from ...core.config.trainer import AirEvent
from ...core.records import ModelCall, ToolCall
from ...core.tools import dicts

Json = dict[str, Any]

# Tool results begin like this if LangGraph, the OpenAI Agents SDK, CrewAI, AG2 or Agent Framework made them from an
# exception, or if they are an exception's own text.
_ERROR = re.compile(
    r"\s*(\w*(error|exception):|error (executing|invoking|calling) |an error occurred|i encountered an error"
    r"|traceback \(most recent call last\):)",
    re.IGNORECASE,
)
FLAGS = ("is_error", "isError")


def air_rewards(calls: Sequence[ModelCall], weights: Mapping[AirEvent, float]) -> dict[str, float]:
    """Return the automatic rewards by call id: the sum of the weights of a call's events.

    `calls`: a rollout's, in order. `weights`: `trainer.air`. Calls without an event that has a weight are left out.
    """
    if not weights:
        return {}
    seen: set[tuple[str, bytes]] = set()
    found: dict[str, float] = {}
    for call in (call for call in calls if call.is_decision):
        if events := [event for event in _events(call, seen) if event in weights]:
            found[call.call_id] = sum(weights[event] for event in events)
    return found


def _events(call: ModelCall, seen: set[tuple[str, bytes]]) -> Iterator[AirEvent]:
    """The call's events, by their names in `trainer.air`. Its tool calls (name, arguments) are added to `seen`."""
    if call.finish_reason == "length":
        yield "truncated"
    schemas = tool_schemas(call.request)
    for tool in call.tool_calls:
        if failed(tool):
            yield "tool_error"
        arguments = _parsed(tool.arguments)
        if not arguments_match(tool, schemas):
            yield "bad_arguments"
        canonical = (
            tool.arguments.encode() if arguments is None else orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS)
        )
        if (same := (tool.name, canonical)) in seen:
            yield "repeated_call"
        seen.add(same)


def failed(tool: ToolCall) -> bool:
    """Return whether a tool call's result, as the agent sent it back, is an error.

    Not every API has a flag for it, so the result decides too: a text that begins like an exception, or a JSON object
    with an error or an error flag.
    """
    if tool.is_error:
        return True
    parts = [part.get("text") for part in dicts(tool.result)]
    text = tool.result if isinstance(tool.result, str) else "\n".join(part for part in parts if isinstance(part, str))
    fields = (_parsed(text) or {}) if text.startswith("{") else {}
    return bool(_ERROR.match(text) or fields.get("error") or any(fields.get(name) is True for name in FLAGS))


def tool_schemas(request: Json) -> dict[str, Any]:
    """Return, by name, the JSON schema of each tool that a request offers; None for a tool with free-form input."""
    found: dict[str, Any] = {}
    tools = dicts(request.get("tools"))
    for tool in [*tools, *(tool for namespace in tools for tool in dicts(namespace.get("tools")))]:
        described = next((tool[key] for key in ("function", "custom") if isinstance(tool.get(key), dict)), tool)
        schema = described.get("parameters", described.get("input_schema", {}))
        if isinstance(name := described.get("name"), str):
            found[name] = None if tool.get("type") == "custom" and "input_schema" not in tool else schema
    return found


def arguments_match(tool: ToolCall, schemas: Mapping[str, Any]) -> bool:
    """Return whether the arguments are a JSON object that the tool's schema allows.

    Free-form input always matches. If the schema is missing or wrong, or refers to another document, any object does.
    """
    schema = schemas.get(tool.name, {})
    if schema is None:
        return True
    arguments = _parsed(tool.arguments)
    if arguments is None:
        return False
    try:
        validator = validator_for(schema)
        validator.check_schema(schema)
        # With a registry of its own, jsonschema does not fetch what a schema refers to.
        return bool(validator(schema, registry=REGISTRY).is_valid(arguments))
    except (SchemaError, Unresolvable, RecursionError, TypeError, ValueError, OverflowError):
        return True


def _parsed(arguments: str) -> Json | None:
    """The arguments as a JSON object; None if they are not one. An empty string counts as {}."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
