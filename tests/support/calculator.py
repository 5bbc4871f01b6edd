"""A model that is played: asked for a product it calls the agent's tool, and then says what the tool told it.

It does so in whichever API, streamed or not. What it was asked is kept, by the credential that came with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from aiohttp import web
from traffic.shapes import Ids, Said, items, tools_of, whole_answer

Json = dict[str, Any]
QUESTION = re.compile(r"(\d+) \* (\d+)")


class Calculator:
    def __init__(self) -> None:
        self.asked: dict[str | None, list[Json]] = defaultdict(list)
        self._ids = Ids()

    async def __call__(self, request: web.Request, body: Json) -> tuple[int, Json]:
        self.asked[key_of(request)].append(body)
        return 200, whole_answer(request.path, body, [say(body)], self._ids)


def key_of(request: web.Request) -> str | None:
    """The credential that came with a request."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return request.headers.get("X-Api-Key") or bearer or None


def say(request: Json) -> Said:
    """The call of the tool for the last product that is asked for, or what came of it."""
    names = [tool.name for tool in tools_of(request)]
    multiply = next((name for name in names if name.endswith("multiply")), None)
    for item in reversed([item for item in items(request) if not _is_system(item)]):
        text = _text(item)
        if multiply and (question := QUESTION.search(text)):
            a, b = map(int, question.groups())
            return Said(calls=[(multiply, {"a": a, "b": b})])
        if numbers := re.findall(r"\d+", text):
            answer = f"Multiplied by the tool, the two numbers make {numbers[-1]}."
            return Said(calls=[("final_answer", {"answer": answer})]) if "final_answer" in names else Said(answer)
    return Said("Fine.")


def _text(item: Any) -> str:
    """What an item of a conversation says, without the tool calls and ids in it."""
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return "\n".join(map(_text, item))
    return _text([item[name] for name in ("content", "text", "output") if item.get(name)])


def _is_system(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") in ("system", "developer")
