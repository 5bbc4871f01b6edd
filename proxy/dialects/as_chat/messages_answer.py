"""Turns a non-streamed chat answer into an answer of /v1/messages, as vLLM's own route does."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ....core.json_text import loads

Json = dict[str, Any]


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
