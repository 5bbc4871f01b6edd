"""Assembles a streamed answer into what the same call returns without streaming. Pure.

`joined` and `put` combine values; `AnswerParts` and `ToolCalls` find the part that a piece belongs to. For example,
`{index 0, id a, name f}`, `{index 0, id "", arguments "{"}`, `{index 0, arguments "}"}` are one call of f with "{}".
Servers differ: some give every call index 0 or no index, repeat id and name, leave them empty, or send them late.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Generic, TypeVar

from ...core.json_text import dumps, loads
from ...core.tools import dicts
from ...core.values import number

Json = dict[str, Any]
Part = TypeVar("Part")

# By the last word of their names, texts that are sent in full, and by some servers again in every chunk.
_WORDS = "role id type name reason object format status model provider phase channel signature"
# Parts of a content that are streamed in pieces, each in a part of its own.
_TEXT_PARTS = ("text", "thinking", "output_text", "reasoning")
# What a tool is called with: functions have arguments, custom tools an input.
_TEXTS = {"function": "arguments", "custom": "input"}


def joined(old: Any, new: Any, name: str) -> Any:
    """Return a field's value joined with the next chunk's: texts, lists and objects grow; null and "" change nothing.

    Words (`role`, `id`, …) and numbers are replaced. Objects and lists in `old` are changed in place.
    """
    if isinstance(new, dict):
        merged = old if isinstance(old, dict) else {}
        for key, item in new.items():
            merged[key] = joined(merged.get(key), item, key)
        return merged
    if isinstance(new, list) or (isinstance(new, str) and isinstance(old, list)):
        items = _as_parts(old)
        for i, item in enumerate(_as_parts(new)):
            if (at := _continued(items, item, first=i == 0)) is None:
                items.append(item)
            else:
                items[at] = joined(dict(items[at]), item, "")
        return items
    if isinstance(new, str):
        return old + new if isinstance(old, str) and not _is_word(name) else new or old or ""
    return old if new is None else new


def put(into: Json, name: str, value: Any) -> None:
    """Set a field. Empty values other than 0 and false replace nothing. Objects are joined field by field."""
    old = into.get(name)
    if isinstance(value, dict) and isinstance(old, dict):
        merged = into[name] = dict(old)
        for key, item in value.items():
            put(merged, key, item)
    elif value or value == 0 or name not in into:
        into[name] = value


@lru_cache(256)
def _is_word(name: str) -> bool:
    return name.rpartition("_")[2] in _WORDS.split()


def _as_parts(content: Any) -> list[Any]:
    text = [{"type": "text", "text": content}] if content and isinstance(content, str) else []
    return content if isinstance(content, list) else text


def _continued(items: list[Any], item: Any, *, first: bool) -> int | None:
    """The position of the part that `item` continues, or None. Without an index, that can only be the last part."""
    if not isinstance(item, dict):
        return None
    alike, places = (item.get("type"), item.get("index")), range(len(items))
    if not isinstance(alike[1], int):
        places = places[-1:] if first and alike[0] in _TEXT_PARTS else places[:0]
    known = ((at, items[at]) for at in places if isinstance(items[at], dict))
    return next((at for at, one in known if (one.get("type"), one.get("index")) == alike), None)


class AnswerParts(Generic[Part]):
    """The parts of an answer, in index order. A part without an index, or with one that is taken, goes to the end."""

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}  # by place
        self._end = 0
        self._known: dict[int | str | None, Part] = {}

    def __iter__(self) -> Iterator[Part]:
        return (self._parts[place] for place in sorted(self._parts))

    @property
    def opened(self) -> list[Part]:
        """Return the parts in the order in which they were opened."""
        return [*self._parts.values()]

    def get(self, key: Any) -> Part | None:
        """Return the last part with this index or id; for None, the part that the last piece belongs to."""
        return self._known.get(key) if isinstance(key, int | str | None) else None

    def open(self, index: int | None, part: Part) -> Part:
        place = self._end if index is None or index in self._parts else index
        self._end = max(self._end, place + 1)
        self._parts[place] = part
        self.keep(part, index)
        return part

    def keep(self, part: Part, index: int | None, part_id: Any = None) -> None:
        """Note the index and id that a piece of this part had."""
        self._known[index] = self._known[None] = part
        if part_id and isinstance(part_id, str):
            self._known[part_id] = part


class ToolCalls(AnswerParts["StreamedCall"]):
    """The tool calls of one answer."""

    def feed(self, deltas: Any) -> None:
        for delta in dicts(deltas if isinstance(deltas, list) else [deltas]):
            index, piece = number(delta.get("index")), StreamedCall(delta)
            call = self._call_of(piece, index)
            if not call.has(piece):
                call.add(delta)
            self.keep(call, index, call.id)

    def _call_of(self, piece: StreamedCall, index: int | None) -> StreamedCall:
        """The call that a piece belongs to, found by id or index; else the last piece's call, or a new one."""
        call, last, same = self.get(index), self.get(None), self.get(piece.id or "")
        if same and (index is None or not piece.name or (piece.name == same.name and not same.is_complete)):
            call = same
        elif call is None and last and not (piece.name or piece.id or (piece.text.strip() and last.is_complete)):
            call = last
        return self.open(index, StreamedCall({})) if call is None or call.ends_before(piece, index) else call


class StreamedCall:
    """One tool call as received so far, or a piece of one."""

    def __init__(self, delta: Json) -> None:
        self.id: Any = None
        self.name = ""
        self.arguments: Any = None  # a text, or by some servers an object
        self._kind = "function"
        self._fields: Json = {}
        self.add(delta)

    @property
    def text(self) -> str:
        """Return the arguments so far, as text; arguments that came as an object are written as JSON."""
        arguments = self.arguments
        return arguments if isinstance(arguments, str) else "" if arguments is None else dumps(arguments)

    @property
    def may_change(self) -> bool:
        """Return whether more pieces may change the text rather than only extend it."""
        return self.arguments == "{}" or not isinstance(self.arguments, str | None)

    @property
    def is_complete(self) -> bool:
        try:
            return self.text.rstrip().endswith("}") and isinstance(loads(self.text), dict)
        except ValueError:
            return False

    def has(self, piece: StreamedCall) -> bool:
        """Return whether a piece repeats the entire call, or all its arguments."""
        is_named = not piece.name or (piece.name == self.name and bool(self.id))
        is_same = piece.arguments == self.arguments and piece.id in (None, "", self.id)
        return is_named and is_same and self.is_complete

    def ends_before(self, piece: StreamedCall, index: int | None) -> bool:
        """Return whether a piece that seems to belong to this call begins a new one."""
        if piece.id and self.id and piece.id != self.id:
            return bool(piece.name) or self.is_complete
        if not piece.name or not self.name or self.has(piece):
            return False
        if piece.text.strip() and self.is_complete:
            return True
        return not piece.name.startswith(self.name) and (index is None or bool(self.text.strip()))

    def add(self, delta: Json) -> None:
        self.id = self.id or delta.get("id")
        for name, value in delta.items():
            if name in _TEXTS and isinstance(value, dict):
                self._kind, called = name, value.get("name")
                if isinstance(called, str):  # repeated, sent as far as it has come, or in pieces
                    self.name = called if called.startswith(self.name) else self.name + called
                self._extend(value.get(_TEXTS[name]))
            elif name not in ("id", "index", *_TEXTS):
                self._fields[name] = joined(self._fields.get(name), value, name)

    def _extend(self, more: Any) -> None:
        before, is_blank = self.arguments, more is None or (isinstance(more, str) and not more.strip())
        is_only_begun = before == "{}" and self._kind == "function"  # some servers begin with an empty object
        if isinstance(before, dict) and isinstance(more, dict):
            self.arguments = before | more
        elif isinstance(before, str) and isinstance(more, str) and (is_blank or not is_only_begun):
            self.arguments = before + more
        elif before is None or not is_blank:
            self.arguments = more

    def result(self) -> Json:
        """Return the call as it is in a non-streamed answer."""
        return {"id": self.id} | self._fields | {self._kind: {"name": self.name, _TEXTS[self._kind]: self.text}}


class Assembler:
    """Joins the pieces of texts, tool calls and tokens. Other fields keep their last non-empty value."""

    def __init__(self) -> None:
        self._top: Json = {}
        self._choices: dict[int, _Choice] = {}

    def feed(self, chunk: Json) -> None:
        top = self._top
        for name, value in chunk.items():
            if name != "choices" and (value or value == 0 or name not in top):
                top[name] = value
        for place, choice in enumerate(dicts(chunk.get("choices"))):
            if (index := number(choice.get("index"))) is None:
                index = place
            if index not in self._choices:
                self._choices[index] = _Choice(index)
            self._choices[index].feed(choice)

    def result(self) -> Json | None:
        """Return the answer so far; None before the first chunk."""
        if not self._top and not self._choices:
            return None
        top = dict(self._top)
        if top.get("object") == "chat.completion.chunk":
            top["object"] = "chat.completion"
        return top | {"choices": [self._choices[index].result() for index in sorted(self._choices)]}


class _Choice:
    """One choice. Its message is built from deltas; some servers also send the message so far."""

    def __init__(self, index: int) -> None:
        self._fields: Json = {"index": index}
        self._message: Json = {}
        self._calls: dict[str, ToolCalls] = {}
        self._has_deltas = False

    def feed(self, choice: Json) -> None:
        for name, value in choice.items():
            if name in ("text", "logprobs", "token_ids"):
                self._fields[name] = joined(self._fields.get(name), value, name)
            elif name not in ("index", "delta", "message"):
                put(self._fields, name, value)
        delta, message = choice.get("delta"), choice.get("message")
        self._has_deltas |= delta is not None
        if delta is None and isinstance(message, dict):
            known = self._message | self._calls if self._has_deltas else {}
            delta = {name: value for name, value in message.items() if not known.get(name)}
        if not isinstance(delta, dict):
            return
        self._fields["message"] = self._message
        for name, value in delta.items():
            if name in ("tool_calls", "function_call") and isinstance(value, list | dict):
                pieces = [{"function": value}] if name == "function_call" else value
                self._calls.setdefault(name, ToolCalls()).feed(pieces)
            else:
                self._message[name] = joined(self._message.get(name), value, name)

    def result(self) -> Json:
        if "message" not in self._fields:
            return self._fields
        message = self._message | {name: [call.result() for call in calls] for name, calls in self._calls.items()}
        if "function_call" in self._calls:  # of OpenAI's API before there were tools
            message["function_call"] = next((call["function"] for call in message["function_call"]), None)
        return self._fields | {"message": message}
