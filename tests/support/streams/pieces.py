"""Writes the events of streams as other servers send them, and cases of them."""

from __future__ import annotations

import json
from typing import Any

from support.cases import Case

Json = dict[str, Any]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOP: Json = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
DONE = "data: [DONE]\n\n"
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
CITY, ZONE = '{"city":"Paris"}', '{"tz":"UTC"}'
BOTH = [["call_a", "get_weather", CITY], ["call_b", "get_time", ZONE]]
ONE = [["call_a", "get_weather", CITY]]


def frame(event: Any, name: str | None = None) -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(event, ensure_ascii=False)}\n\n"


def chunk(delta: Any = None, index: Any = 0, **choice: Any) -> str:
    return frame(TOP | {"choices": [{"index": index, "delta": delta or {}, "finish_reason": None} | choice]})


def piece(call_id: Any = None, name: Any = None, arguments: Any = None, index: Any = 0, **more: Any) -> Json:
    """One piece of a tool call; what is None is not there."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    given = {key: value for key, value in (("index", index), ("id", call_id)) if value is not None}
    return given | ({"function": function} if function else {}) | more


def calls(*pieces: Json, end: str = "tool_calls") -> list[str]:
    """A chat stream of these pieces, one to a chunk."""
    said = [chunk({"tool_calls": [p]}) for p in pieces]
    return [chunk({"role": "assistant", "content": None}), *said, chunk(finish_reason=end), DONE]


def case(name: str, stream: list[Any], path: str = CHAT, **expected: Any) -> Case:
    return {"name": name, "path": path, "stream": stream} | expected


def say(*deltas: Json, **last: Any) -> list[str]:
    return [
        chunk({"role": "assistant", "content": ""}),
        *map(chunk, deltas),
        chunk(**{"finish_reason": "stop"} | last),
        DONE,
    ]
