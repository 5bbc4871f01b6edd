"""Turns the chunks of a chat stream into the events of /v1/responses: one item at a time is open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .responses_answer import ResponsesReply, logprobs
from .responses_open_items import OpenCall, OpenItem, OpenMessage, OpenReasoning

Json = dict[str, Any]


class ResponsesStreamTranslation:
    """One stream. Its chunks may come with more than the agent asked for, and without text or calls."""

    def __init__(self, reply: ResponsesReply) -> None:
        self._reply = reply
        self._chat: Json = {}
        self._finish = "stop"
        self._items: list[Json] = []
        self._open: OpenItem | None = None
        self._sent = 0

    def feed(self, chunk: Json) -> Iterable[Json]:
        if error := chunk.get("error"):
            return self._numbered([_error(error)])
        return self._numbered([*self._begun(chunk), *self._deltas(chunk)])

    def end(self) -> Iterable[Json]:
        closed = self._closed()
        response = self._reply.response(self._chat, self._items, self._finish)
        return self._numbered([*closed, {"type": "response.completed", "response": response}])

    def _numbered(self, events: list[Json]) -> list[Json]:
        numbered = [event | {"sequence_number": self._sent + number} for number, event in enumerate(events)]
        self._sent += len(events)
        return numbered

    def _begun(self, chunk: Json) -> list[Json]:
        known = bool(self._chat)
        self._chat |= {name: value for name, value in chunk.items() if value is not None}
        if known:
            return []
        response = self._reply.response(self._chat, [])
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _deltas(self, chunk: Json) -> Iterator[Json]:
        for choice in chunk["choices"]:
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice["delta"]
            if self._reply.thoughts and (reasoning := delta.get("reasoning")) is not None:
                yield from self._added(OpenReasoning, reasoning)
            if content := delta.get("content"):
                tokens = logprobs(choice) if self._reply.logprobs else []
                yield from self._added(OpenMessage, content, tokens)
            for index, parts in _by_index(delta.get("tool_calls") or ()).items():
                yield from self._called(index, parts)

    def _added(
        self, kind: type[OpenReasoning] | type[OpenMessage], text: str, tokens: Sequence[Json] = ()
    ) -> list[Json]:
        item = self._open
        if isinstance(item, kind):
            return item.add(text, tokens)
        closed = self._closed()
        item = self._open = kind(len(self._items))
        return [*closed, *item.open(), *item.add(text, tokens)]

    def _called(self, index: Any, parts: list[Json]) -> list[Json]:
        arguments = "".join(part["function"].get("arguments") or "" for part in parts)
        item = self._open
        if isinstance(item, OpenCall) and item.call_index == index:
            return item.add(arguments)
        closed = self._closed()
        item = self._open = OpenCall(len(self._items), self._reply, index, parts[0])
        return [*closed, *item.open(), *item.add(arguments)]

    def _closed(self) -> list[Json]:
        if self._open is None:
            return []
        events = self._open.close()
        self._items.append(events[-1]["item"])
        self._open = None
        return events


def _by_index(calls: Iterable[Json]) -> dict[Any, list[Json]]:
    """A chunk's parts of calls, by the place of the call."""
    parts: dict[Any, list[Json]] = {}
    for call in calls:
        if call.get("function") is not None:
            parts.setdefault(call.get("index"), []).append(call)
    return parts


def _error(error: Any) -> Json:
    fields = error if isinstance(error, dict) else {"message": str(error)}
    code = fields.get("code")
    message = str(fields.get("message"))
    return {"type": "error", "code": None if code is None else str(code), "message": message, "param": None}
