"""Assembles the chunks of a streamed answer into the object that the same call returns without streaming."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

# Sent whole, and by some servers again in every chunk: never concatenated.
_WHOLE = frozenset({"role", "id", "type", "name", "finish_reason", "stop_reason", "object"})


class Assembler:
    """Joins strings, merges tool calls by index, extends other lists, and takes the last value of anything else."""

    def __init__(self) -> None:
        self._top: Json = {}
        self._choices: dict[int, Json] = {}

    def feed(self, chunk: Json) -> None:
        top = self._top
        for name, value in chunk.items():
            if name == "choices":
                for choice in value if isinstance(value, list) else ():
                    self._feed_choice(choice)
            elif value is not None or name not in top:
                top[name] = value

    def result(self) -> Json | None:
        """Return the answer so far; None before the first chunk."""
        if not self._top and not self._choices:
            return None
        top = dict(self._top)
        if top.get("object") == "chat.completion.chunk":
            top["object"] = "chat.completion"
        return top | {"choices": [self._choices[index] for index in sorted(self._choices)]}

    def _feed_choice(self, choice: Any) -> None:
        if not isinstance(choice, dict):
            return
        index = choice.get("index")
        merged = self._choices.setdefault(index if isinstance(index, int) else 0, {})
        so_far = "delta" in choice  # some servers send the message as far as it is beside each delta
        for name, value in choice.items():
            if value is None:
                merged.setdefault(name, None)
            elif name == "delta":
                _merge_field(merged, "message", value)
            elif not (so_far and name == "message"):
                _merge_field(merged, name, value)


def _merge_field(into: Json, name: str, value: Any) -> None:
    if value is None:
        into.setdefault(name, None)
        return
    old = into.get(name)
    if isinstance(value, str):
        into[name] = old + value if isinstance(old, str) and name not in _WHOLE else value
    elif isinstance(value, dict):
        merged = into[name] = old if isinstance(old, dict) else {}  # ours: no chunk's own object is ever put in
        for key, item in value.items():
            _merge_field(merged, key, item)
    elif name == "tool_calls" and isinstance(value, list):
        into[name] = _merge_tool_calls(old if isinstance(old, list) else [], value)
    elif isinstance(value, list):
        into[name] = old + value if isinstance(old, list) else list(value)
    else:
        into[name] = value


def _merge_tool_calls(old: list[Any], deltas: list[Any]) -> list[Any]:
    """Merge each delta into the call that its `index` names; the index itself is left out."""
    for delta in deltas:
        if not isinstance(delta, dict):
            continue
        index = delta.get("index")
        position = index if isinstance(index, int) and 0 <= index < len(old) else len(old)
        if position == len(old):
            old.append({})
        for name, value in delta.items():
            if name != "index":
                _merge_field(old[position], name, value)
    return old
