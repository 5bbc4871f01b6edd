"""Assembles the content blocks of a streamed message from their starts and deltas. Pure."""

from __future__ import annotations

from typing import Any

from ...core.json_text import loads
from ...core.values import Places, number

Json = dict[str, Any]

# By what a delta adds: the block that it belongs to, as it is at its start.
_EMPTY: dict[str, Json] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": ""},
    "signature": {"type": "thinking", "thinking": ""},
    "partial_json": {"type": "tool_use", "input": {}},
    "citation": {"type": "text", "text": ""},
}


class Blocks:
    """The blocks of one message. Some servers give several of them one index, or leave out their starts."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._places = Places()
        self._at: dict[int | None, _Block] = {}  # by index: the block that came there last

    def start(self, index: Any, block: Json) -> None:
        place = number(index)
        before = self._at.get(place)
        if before is None or not block.get("id") or before.fields.get("id") != block["id"]:
            self._open(place, block)

    def add(self, index: Any, delta: Json) -> None:
        """Join a delta to its block, which is opened if it was not started."""
        place = number(index)
        kind = next((empty for name, empty in _EMPTY.items() if delta.get(name) is not None), None)
        block = self._at.get(place)
        if block is None or (kind is not None and block.is_other(kind["type"])):
            block = self._open(place, kind or {})
        block.add(delta)

    def result(self) -> list[Json]:
        """Return the blocks in order."""
        return [block.result() for block in sorted(self._blocks, key=lambda block: block.place)]

    def _open(self, index: int | None, block: Json) -> _Block:
        opened = _Block(self._places.take(index), block)
        self._blocks.append(opened)
        self._at[index] = self._at[None] = opened
        return opened


class _Block:
    def __init__(self, place: int, fields: Json) -> None:
        self.place = place
        self.fields = dict(fields)
        self._json: list[str] = []

    def is_other(self, kind: str) -> bool:
        """Return whether no delta of a block of this kind can belong to it."""
        return self.fields.get("type") in ("text", "thinking", "tool_use") and self.fields["type"] != kind

    def add(self, delta: Json) -> None:
        for name, value in delta.items():
            old = self.fields.get(name)
            if name == "partial_json":
                self._add_input(value)
            elif name == "citation":
                before = self.fields.get("citations")
                self.fields["citations"] = [*(before if isinstance(before, list) else ()), value]
            elif name != "type":
                self.fields[name] = old + value if isinstance(old, str) and isinstance(value, str) else value

    def result(self) -> Json:
        """Return the block as it is without streaming. A tool's input comes in pieces of JSON, which may be cut."""
        text = "".join(self._json)
        if not text:
            return self.fields
        try:
            value = loads(text)
        except ValueError:
            value = text
        return self.fields | {"input": text if isinstance(value, str) else value}

    def _add_input(self, value: Any) -> None:
        if isinstance(value, str):
            self._json.append(value)
        elif isinstance(value, dict):
            self.fields["input"] = value
