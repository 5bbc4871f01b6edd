"""Turns chat answers, whole or in chunks, into answers and events of /v1/messages, as vLLM's own route does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from ....core.json_text import loads

Json = dict[str, Any]

_EMPTY = {"text": {"type": "text", "text": ""}, "thinking": {"type": "thinking", "thinking": ""}}


def message_of(chat: Json) -> Json:
    """Return a chat answer as a message of the API."""
    choice = chat["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    content = _blocks(message, calls)
    complete = bool(calls) and all(is_json(call["function"]["arguments"]) for call in calls)
    reason, sequence = stop_reason(choice.get("finish_reason"), choice.get("stop_reason"), bool(calls), complete)
    answer = {
        "id": chat["id"], "type": "message", "role": "assistant", "content": content, "model": chat["model"],
        "stop_reason": reason, "stop_sequence": sequence, "usage": usage_of(chat.get("usage")),
        "kv_transfer_params": chat.get("kv_transfer_params"), "ec_transfer_params": chat.get("ec_transfer_params"),
    }  # fmt: skip
    return {name: value for name, value in answer.items() if value is not None}


def stop_reason(finish: str | None, stop: Any, called: bool, complete: bool) -> tuple[str | None, str | None]:
    """Return why an answer ended, and the stop sequence that ended it.

    `called`: a tool was called. `complete`: and its arguments are complete; then a stop sequence says nothing more.
    """
    if finish == "length":
        return "max_tokens", None
    if finish not in ("stop", "tool_calls"):
        return None, None
    if complete:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if called or finish == "tool_calls" else "end_turn"), None


def usage_of(usage: Any) -> Json:
    """Return the usage, with cached tokens counted apart where vLLM reports them."""
    if not isinstance(usage, dict):
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.get("prompt_tokens_details") or {}
    created, read = details.get("created_cache_tokens"), details.get("cached_tokens")
    out = {"input_tokens": max(0, usage["prompt_tokens"] - (read or 0) - (created or 0))}
    out["output_tokens"] = usage.get("completion_tokens") or 0
    cache = {"cache_creation_input_tokens": created, "cache_read_input_tokens": read}
    return out | {name: count for name, count in cache.items() if count is not None}


def is_json(text: str) -> bool:
    """Return whether a tool's arguments are complete."""
    try:
        loads(text)
    except ValueError:
        return False
    return True


def _blocks(message: Json, calls: list[Json]) -> list[Json]:
    blocks: list[Json] = []
    if reasoning := message.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": uuid4().hex})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in calls:
        function = call["function"]
        tool = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append(tool | {"input": _input(function["arguments"])})
    return blocks or [{"type": "text", "text": ""}]


def _input(arguments: str) -> Json:
    """A tool's input. Text that is no object, as where max_tokens cut it, is kept as Anthropic suggests."""
    if not arguments:
        return {}
    loaded = loads(arguments) if is_json(arguments) else None
    return loaded if isinstance(loaded, dict) else {"INVALID_JSON": arguments}


class MessagesEvents:
    """One streamed answer: a start, blocks one after the other, a delta with the usage, a stop."""

    def __init__(self) -> None:
        self._started = self._finished = False
        self._usage: Any = None
        self._finish: str | None = None
        self._stop: Any = None
        self._blocks = _Blocks()

    def feed(self, chunk: Json) -> list[Json]:
        return list(self._events(chunk))

    def end(self) -> list[Json]:
        return [*self._closed(), {"type": "message_stop"}]

    def _events(self, chunk: Json) -> Iterator[Json]:
        if error := chunk.get("error"):
            yield error_of(error)
            return
        self._usage = chunk.get("usage") or self._usage
        if not self._started:
            self._started = True
            yield self._start(chunk)
        for choice in chunk["choices"][:1]:
            if choice.get("finish_reason") is not None:
                self._finish, self._stop = choice["finish_reason"], choice.get("stop_reason")
            yield from self._blocks.feed(choice.get("delta") or {})
        if not chunk["choices"]:
            yield from self._closed()

    def _start(self, chunk: Json) -> Json:
        message = {"id": chunk["id"], "type": "message", "role": "assistant", "content": [], "model": chunk["model"]}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": usage_of(chunk.get("usage"))}
        return {"type": "message_start", "message": message}

    def _closed(self) -> Iterator[Json]:
        """The end of the last block and the reason; a server that sends no usage sends them at the end."""
        if self._finished:
            return
        self._finished = True
        yield from self._blocks.stop()
        blocks = self._blocks
        reason, text = stop_reason(self._finish or "stop", self._stop, blocks.called, blocks.complete)
        delta = {"stop_reason": reason, "stop_sequence": text}
        yield {"type": "message_delta", "delta": delta, "usage": usage_of(self._usage)}


class _Blocks:
    """The content blocks of an answer, of which one is open at a time."""

    def __init__(self) -> None:
        self.called = False
        self._index = 0
        self._open: str | None = None
        self._tool: str | None = None  # its id, while its block is open
        self._tools: dict[int, str] = {}
        self._arguments: list[str] = []  # of the latest tool
        self._held: list[str] = []  # text that came while a tool's block was open

    @property
    def complete(self) -> bool:
        """Whether the last tool's arguments are complete; only the last can have been cut."""
        return self.called and is_json("".join(self._arguments))

    def feed(self, delta: Json) -> Iterator[Json]:
        if reasoning := delta.get("reasoning"):
            yield from self._piece("thinking", reasoning)
        if text := delta.get("content"):
            if self._open == "tool_use":
                self._held.append(text)
            else:
                yield from self._piece("text", text)
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def stop(self) -> Iterator[Json]:
        """End the open block; what was held back becomes a block of its own."""
        held, self._held = "".join(self._held), []
        yield from self._end()
        if held:
            yield from self._piece("text", held)
            yield from self._end()

    def _piece(self, kind: str, piece: str) -> Iterator[Json]:
        if self._open != kind:
            yield from self.stop()
            yield self._begin(_EMPTY[kind])
        yield self._delta({"type": f"{kind}_delta", kind: piece})

    def _call(self, call: Json) -> Iterator[Json]:
        function = call.get("function") or {}
        if (tool := call.get("id")) is not None:
            self._tools[call["index"]] = tool
            if (name := function.get("name")) is not None:
                yield from self.stop()
                self.called, self._arguments = True, []
                yield self._begin({"type": "tool_use", "id": tool, "name": name, "input": {}})
                self._tool = tool
        if (piece := function.get("arguments")) and self._tool == self._tools.get(call["index"], self):
            self._arguments.append(piece)
            yield self._delta({"type": "input_json_delta", "partial_json": piece})

    def _begin(self, block: Json) -> Json:
        self._open = block["type"]
        return {"type": "content_block_start", "content_block": dict(block), "index": self._index}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "delta": delta, "index": self._index}

    def _end(self) -> Iterator[Json]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": uuid4().hex})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = self._tool = None
        self._index += 1


def error_of(error: Any) -> Json:
    """Return an error of the chat route as one of /v1/messages, in its own words."""
    parts = error if isinstance(error, dict) else {"message": str(error)}
    kind, message = parts.get("type") or "internal_error", str(parts.get("message"))
    return {"type": "error", "error": {"type": kind, "message": message}}
