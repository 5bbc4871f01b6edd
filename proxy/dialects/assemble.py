"""Assembles the chunks of a streamed chat answer into the object that the same call returns without streaming. Pure.

Tool calls come in pieces: `{index 0, id a, name f}`, `{index 0, id "", arguments "{"}`, `{index 0, arguments "}"}` are
one call of f with "{}". Servers differ: some count every call 0 or give no index, repeat id and name or leave them
empty, or send them late.
"""

from __future__ import annotations

from typing import Any

from ...core.json_text import dumps, loads
from ...core.values import Places, join, number, objects, put

Json = dict[str, Any]

# What a choice has in pieces beside its message.
_PIECES = frozenset({"text", "logprobs", "token_ids"})
# What a tool is called with: functions have arguments, custom tools an input.
_TEXTS = {"function": "arguments", "custom": "input"}


class ToolCalls:
    """The calls of one answer."""

    def __init__(self) -> None:
        self._calls: list[ToolCallPieces] = []  # in the order in which they were opened
        self._places = Places()
        self._at: dict[int, ToolCallPieces] = {}  # by index: the call opened there last
        self._by_id: dict[str, ToolCallPieces] = {}  # the call that got this id last
        self._last: ToolCallPieces | None = None  # the one that the last piece belonged to

    def feed(self, deltas: Any) -> None:
        for delta in objects(deltas):
            call = self._last = self._call_of(delta, number(delta.get("index")))
            before = call.id
            call.add(delta)
            if isinstance(call.id, str) and call.id != before:
                self._by_id[call.id] = call

    @property
    def opened(self) -> bool:
        return bool(self._calls)

    def named(self) -> list[ToolCallPieces]:
        """Return the calls as they were opened. One without a name is no call: its pieces came under another id."""
        named: list[ToolCallPieces] = []
        for call in self._calls:
            continues = named and not call.name and named[-1].may_be_followed_by(call)
            named.append(named.pop().with_more(call) if continues else call)
        return named

    def result(self) -> list[Json]:
        """Return the calls as an answer has them, by index."""
        return [call.result() for call in sorted(self.named(), key=lambda call: call.place)]

    def _call_of(self, delta: Json, index: int | None) -> ToolCallPieces:
        call = self._known(delta, index)
        if call is None or call.ends_before(delta, index):
            call = ToolCallPieces(index, self._places.take(index))
            self._calls.append(call)
        if index is not None:
            self._at[index] = call
        return call

    def _known(self, delta: Json, index: int | None) -> ToolCallPieces | None:
        """The call at this index, unless the id is another's; without an index that one, or the last piece's."""
        at_index, call_id = self._at.get(index) if index is not None else None, delta.get("id")
        if call_id and (at_index is None or at_index.id != call_id):
            same = self._by_id.get(call_id) if isinstance(call_id, str) else None
            if same is not None and (index is None or same.is_continued_by(delta)):
                return same
        if at_index is not None:
            return at_index
        if index is None:
            return self._last
        begins = bool(delta.get("id") or _named(delta)[0])
        return None if begins or self._last is None or self._last.index is not None else self._last


class ToolCallPieces:
    """One call, as far as it has come."""

    def __init__(self, index: int | None = None, place: int = 0) -> None:
        self.index = index
        self.place = place
        self.id: Any = None
        self.name = ""
        self._arguments: Any = None  # the arguments: a text, or by some servers an object
        self._may_be_none = False  # they are an empty object that came with the name: some servers begin so
        self._fields: Json = {}

    def add(self, delta: Json) -> None:
        if self._is_again(delta):
            return
        self.id = self.id or delta.get("id")
        for name, value in delta.items():
            if name in _TEXTS and isinstance(value, dict):
                inner = self._fields[name] = self._fields.get(name) or {}
                self._add_named(inner, _TEXTS[name], value)
            elif name != "index":
                join(self._fields, name, value)

    def ends_before(self, delta: Json, index: int | None) -> bool:
        """Return whether a piece that came to this call's place belongs to a new call."""
        call_id, (name, arguments) = delta.get("id"), _named(delta)
        if call_id and self.id and call_id != self.id:
            return True
        if not name or not self.name or self._is_again(delta):
            return False
        if _is_given(arguments) and self.is_complete:
            return True
        return not name.startswith(self.name) and (index is None or _is_given(self._arguments))

    def is_continued_by(self, delta: Json) -> bool:
        """Return whether a piece that has this call's id, and another's index, does not begin a call."""
        name, _ = _named(delta)
        return not name or (name == self.name and not self.is_complete)

    def may_be_followed_by(self, other: ToolCallPieces) -> bool:
        """Return whether the pieces of a call without a name may be of this one."""
        if other.index == self.index:
            return True
        return other.id in (None, "", self.id) and not (_is_given(other.text) and self.is_complete)

    def with_more(self, other: ToolCallPieces) -> ToolCallPieces:
        """Return this call with the arguments of another after its own."""
        both = ToolCallPieces(self.index, self.place)
        for call in (self, other):
            both.add({name: value for name, value in call.result().items() if call is self or name in _TEXTS})
        return both

    def result(self) -> Json:
        """Return the call as an answer has it."""
        text = None if self._arguments is None else self.text
        texts = {kind: self._fields[kind] | {name: text} for kind, name in _TEXTS.items() if self._has(kind, name)}
        return self._fields | texts

    @property
    def text(self) -> str:
        """Return the arguments so far; those that came as an object are JSON text, as models write them."""
        return (
            self._arguments
            if isinstance(self._arguments, str)
            else ""
            if self._arguments is None
            else dumps(self._arguments)
        )

    @property
    def may_change(self) -> bool:
        """Return whether more pieces may change the text, not only extend it."""
        return self._may_be_none or not isinstance(self._arguments, str | None)

    @property
    def is_complete(self) -> bool:
        if not isinstance(self._arguments, str):
            return self._arguments is not None
        try:
            return self._arguments.rstrip().endswith("}") and isinstance(loads(self._arguments), dict)
        except ValueError:
            return False

    def _is_again(self, delta: Json) -> bool:
        """Whether this is the entire call once more, or all its arguments."""
        name, arguments = _named(delta)
        if arguments != self._arguments or delta.get("id") not in (None, "", self.id):
            return False
        return (not name or (name == self.name and bool(self.id))) and self.is_complete

    def _has(self, kind: str, name: str) -> bool:
        return isinstance(self._fields.get(kind), dict) and name in self._fields[kind]

    def _add_named(self, into: Json, text: str, function: Json) -> None:
        for name, value in function.items():
            if name == text:
                before = None if self._may_be_none and _is_given(value) else self._arguments
                self._may_be_none = value == "{}" and bool(function.get("name")) and not _is_given(before)
                into[name] = self._arguments = _longer(before, value)
            elif name == "name" and isinstance(value, str):
                # Repeated, sent as far as it has come, or in pieces.
                self.name = into[name] = value if value.startswith(self.name) else self.name + value
            else:
                join(into, name, value)


def _named(delta: Json) -> tuple[str, Any]:
    """The name in a piece, empty if there is none, and its arguments."""
    for kind, text in _TEXTS.items():
        if isinstance(function := delta.get(kind), dict):
            name = function.get("name")
            return name if isinstance(name, str) else "", function.get(text)
    return "", None


def _is_given(arguments: Any) -> bool:
    return bool(arguments.strip()) if isinstance(arguments, str) else arguments is not None


def _longer(before: Any, more: Any) -> Any:
    """The arguments with another piece of them."""
    if not _is_given(more):
        return (
            before + more if isinstance(before, str) and isinstance(more, str) else more if before is None else before
        )
    if isinstance(before, dict) and isinstance(more, dict):
        return before | more
    return before + more if isinstance(before, str) and isinstance(more, str) else more


class Assembler:
    """Joins the pieces of texts, tool calls and tokens. Of other fields, the last value that is not empty counts."""

    def __init__(self) -> None:
        self._top: Json = {}
        self._choices: dict[int, _Choice] = {}

    def feed(self, chunk: Json) -> None:
        top = self._top
        for name, value in chunk.items():
            if name == "choices":
                for place, choice in enumerate(value if isinstance(value, list) else ()):
                    if isinstance(choice, dict):
                        self._choice(number(choice.get("index")), place).feed(choice)
            elif value or value == 0 or name not in top:
                top[name] = value

    def _choice(self, index: int | None, place: int) -> _Choice:
        index = place if index is None else index
        if index not in self._choices:
            self._choices[index] = _Choice()
        return self._choices[index]

    def result(self) -> Json | None:
        """Return the answer so far; None before the first chunk."""
        if not self._top and not self._choices:
            return None
        top = dict(self._top)
        if top.get("object") == "chat.completion.chunk":
            top["object"] = "chat.completion"
        return top | {"choices": [self._choices[index].result() for index in sorted(self._choices)]}


class _Choice:
    """One choice. Its message is made of the deltas; some servers send the message as far as it is beside them."""

    def __init__(self) -> None:
        self._fields: Json = {}
        self._message: Json = {}
        self._calls: ToolCalls | None = None
        self._call: ToolCallPieces | None = None  # of OpenAI's API before there were tools
        self._has_deltas = False

    def feed(self, choice: Json) -> None:
        self._has_deltas |= choice.get("delta") is not None
        for name, value in choice.items():
            if name == "delta" or (name == "message" and not self._has_deltas):
                self._feed_message(value)
            elif name == "message":
                if isinstance(value, dict) and "delta" not in choice:
                    self._feed_message({key: item for key, item in value.items() if not self._message.get(key)})
            elif name in _PIECES:
                join(self._fields, name, value)
            else:
                put(self._fields, name, value)

    def result(self) -> Json:
        if "message" not in self._fields or not isinstance(self._fields["message"], dict):
            return dict(self._fields)
        message = dict(self._message)
        if self._calls is not None:
            message["tool_calls"] = self._calls.result()
        if self._call is not None:
            message["function_call"] = self._call.result()["function"]
        return self._fields | {"message": message}

    def _feed_message(self, delta: Any) -> None:
        if not isinstance(delta, dict):
            join(self._fields, "message", delta)
            return
        message = self._message
        if self._fields.get("message") is not message:
            self._fields["message"] = message
        for name, value in delta.items():
            if name == "tool_calls" and isinstance(value, list | dict):
                self._calls = self._calls or ToolCalls()
                self._calls.feed(value)
                message[name] = True  # its place
            elif name == "function_call" and isinstance(value, dict):
                self._call = self._call or ToolCallPieces()
                self._call.add({"function": value})
                message[name] = True
            else:
                join(message, name, value)
