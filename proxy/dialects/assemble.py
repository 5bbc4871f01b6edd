"""Assembles the chunks of a streamed answer into the object that the same call returns without streaming."""

from __future__ import annotations

from typing import Any

from ...core.values import join, number, put
from .tool_pieces import ToolCallPieces, ToolCalls

Json = dict[str, Any]

# What a choice has in pieces beside its message.
_PIECES = frozenset({"text", "logprobs", "token_ids"})


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
