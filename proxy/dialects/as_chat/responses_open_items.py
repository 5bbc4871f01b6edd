"""Makes the events of one output item while it grows: opened, added to, closed."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .responses_answer import ResponsesReply, custom_input, message_item, new_id, reasoning_item, text_part
from .responses_items import CUSTOM_INPUT

Json = dict[str, Any]

# What is before the text of the one argument of a custom tool, and as much as there is of it without a cut escape.
_BEFORE_INPUT = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_INPUT = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*', re.DOTALL)


class OpenItem(ABC):
    """An item at its place in the output. The last of the events by which it closes has the complete item."""

    def __init__(self, place: int, kind: str) -> None:
        self.id = new_id(kind)
        self.text = ""
        self._place = place

    @abstractmethod
    def open(self) -> list[Json]: ...

    @abstractmethod
    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]: ...

    @abstractmethod
    def close(self) -> list[Json]: ...

    def event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._place, **fields}

    def item_event(self, kind: str, item: Json) -> Json:
        return {"type": f"response.output_item.{kind}", "output_index": self._place, "item": item}


class OpenMessage(OpenItem):
    def __init__(self, place: int) -> None:
        super().__init__(place, "msg")
        self._tokens: list[Json] = []

    def open(self) -> list[Json]:
        part = self.event("content_part.added", content_index=0, part=text_part("", []))
        return [self.item_event("added", message_item(self.id, [], "in_progress")), part]

    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]:
        self.text += text
        self._tokens += tokens
        return [self.event("output_text.delta", content_index=0, delta=text, logprobs=list(map(_brief, tokens)))]

    def close(self) -> list[Json]:
        part = text_part(self.text, self._tokens or None)
        return [
            self.event("output_text.done", content_index=0, text=self.text, logprobs=[]),
            self.event("content_part.done", content_index=0, part=part),
            self.item_event("done", message_item(self.id, [part])),
        ]


class OpenReasoning(OpenItem):
    def __init__(self, place: int) -> None:
        super().__init__(place, "rs")

    def open(self) -> list[Json]:
        part = self.event("content_part.added", content_index=0, part=_thought(""))
        return [self.item_event("added", reasoning_item(self.id, None, "in_progress")), part]

    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]:
        self.text += text
        return [self.event("reasoning_text.delta", content_index=0, delta=text)]

    def close(self) -> list[Json]:
        return [
            self.event("reasoning_text.done", content_index=0, text=self.text),
            self.event("content_part.done", content_index=0, part=_thought(self.text)),
            self.item_event("done", reasoning_item(self.id, self.text, "completed")),
        ]


class OpenCall(OpenItem):
    """A call of a function or of a custom tool. The input of a custom tool is read out of its arguments."""

    def __init__(self, place: int, reply: ResponsesReply, index: Any, call: Json) -> None:
        """`index`: its place among the calls of the chat answer; `call`: its first part."""
        self.call_index = index
        self._reply = reply
        self._name = str(call["function"].get("name") or "")
        self._call_id = call.get("id") or f"chatcmpl-tool-{new_id('')[1:]}"
        self._custom = reply.tools.is_custom(self._name)
        self._input = ""
        self._read = 0  # of the arguments, up to what `_input` has
        super().__init__(place, "ctc" if self._custom else "fc")

    def open(self) -> list[Json]:
        return [self.item_event("added", self._item("", "in_progress"))]

    def add(self, text: str, tokens: Sequence[Json] = ()) -> list[Json]:
        self.text += text
        if self._custom:
            return self._more_input(self._begun_input())
        return [self.event("function_call_arguments.delta", delta=text)] if text else []

    def close(self) -> list[Json]:
        if self._custom:
            text = custom_input(self.text)
            events = [*self._more_input(text), self.event("custom_tool_call_input.done", input=text)]
            return [*events, self.item_event("done", self._item(text, "completed"))]
        name = self._reply.tools.own_name(self._name)[1]
        done = self.event("function_call_arguments.done", arguments=self.text, name=name)
        return [done, self.item_event("done", self._item(self.text, "completed"))]

    def _item(self, arguments: str, status: str) -> Json:
        return self._reply.call(self.id, self._call_id, self._name, arguments, status)

    def _begun_input(self) -> str:
        """As much of a custom tool's input as is certain. Each character is read once."""
        arguments = self.text.rstrip()  # as vLLM: blanks wait for what follows
        if not self._read and (before := _BEFORE_INPUT.match(arguments)):
            self._read = before.end()
        found = _INPUT.match(arguments, self._read) if 0 < self._read < len(arguments) else None
        if found is None or not found[0]:
            return self._input
        try:
            more: str = json.loads(f'"{found[0]}"')
        except ValueError:
            self._read = -1  # it is no JSON: read no more
            return ""
        self._read = found.end()
        if "\ud800" <= more[-1] <= "\udbff":  # its other half may follow
            self._read -= 1 if found[0].endswith(more[-1]) else len("\\ud800")
            more = more[:-1]
        return self._input + more

    def _more_input(self, text: str) -> list[Json]:
        """A delta with the new part of the input. Sent text cannot be taken back: changed input is sent anew."""
        before, self._input = self._input, text
        if text == before:
            return []
        return [self.event("custom_tool_call_input.delta", delta=text.removeprefix(before))]


def _thought(text: str) -> Json:
    return {"text": text, "type": "reasoning_text"}


def _brief(token: Json) -> Json:
    """A token's log-probability as a stream has it: without bytes."""
    return {
        "token": token["token"],
        "logprob": token["logprob"],
        "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in token["top_logprobs"]],
    }
