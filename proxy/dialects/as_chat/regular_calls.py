"""Gives translations the tool calls of a chat stream as OpenAI sends them, however the server sends them.

One call after the other, counted from 0, with id, type and name in its first piece alone, and arguments as text.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ....core.tools import call_arguments
from ..tool_pieces import ToolCallPieces, ToolCalls

Json = dict[str, Any]


class RegularCalls:
    """The calls of the first choice. A call waits until the one before it is complete, or the answer has ended."""

    def __init__(self) -> None:
        self._calls = ToolCalls()
        self._place = 0  # of the call that is being sent
        self._sent: list[int] = []  # by call: how many characters of its arguments were sent

    def chunk(self, event: Json) -> Json:
        """Return a chunk with regular tool calls in the place of its own; other chunks as they are."""
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return event
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        ends = bool(choice.get("finish_reason"))
        if not delta.get("tool_calls") and not (ends and self._calls.opened):
            return event
        self._calls.feed(delta.get("tool_calls") or [])
        pieces = self.rest() if ends else self._pieces(to_the_end=False)
        delta = {name: value for name, value in delta.items() if name != "tool_calls"}
        regular = choice | {"delta": delta | ({"tool_calls": pieces} if pieces else {})}
        return event | {"choices": [regular, *event["choices"][1:]]}

    def rest(self) -> list[Json]:
        """Return the pieces that were not sent yet."""
        return self._pieces(to_the_end=True)

    def _pieces(self, *, to_the_end: bool) -> list[Json]:
        found: list[Json] = []
        calls = self._calls.named()
        while self._place < len(calls):
            call = calls[self._place]
            if not to_the_end and not (call.name and (call.id or call.text)):
                break
            waits = call.may_change and self._place + 1 == len(calls) and not to_the_end
            text = "" if waits else call.text
            if self._place == len(self._sent):
                self._sent.append(0)
                found.append(_first(self._place, call, text))
            elif len(text) > self._sent[self._place]:
                more = text[self._sent[self._place] :]
                found.append({"index": self._place, "function": {"arguments": more}})
            self._sent[self._place] = max(self._sent[self._place], len(text))
            if self._place + 1 == len(calls) or not (to_the_end or call.is_complete):
                break
            self._place += 1
        return found


def _first(index: int, call: ToolCallPieces, text: str) -> Json:
    """The first piece of a call. One without an id gets one, as vLLM writes them."""
    call_id = call.id or f"chatcmpl-tool-{uuid4().hex}"
    return {"index": index, "id": call_id, "type": "function", "function": {"name": call.name, "arguments": text}}


def regular_answer(chat: Json) -> Json:
    """Return a non-streamed chat answer in which the arguments of tool calls are text."""
    choice, *others = chat["choices"]
    calls = choice["message"].get("tool_calls")
    if not calls or all(isinstance(call["function"]["arguments"], str) for call in calls):
        return chat
    message = choice["message"] | {"tool_calls": [_with_text(call) for call in calls]}
    return chat | {"choices": [choice | {"message": message}, *others]}


def _with_text(call: Json) -> Json:
    return call | {"function": call["function"] | {"arguments": call_arguments(call["function"])}}
