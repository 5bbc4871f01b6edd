"""Reads the text of recorded answers. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def answer(call: Mapping[str, Any]) -> str:
    """Return the text of a call's answer by chat, completions, Responses or Messages; "" if it has none.

    `call` is one of the calls of `GET /rollouts/{id}`, which a reward function gets, too.
    """
    response = call.get("response")
    if not isinstance(response, dict):
        return ""
    for choice in response.get("choices") or ():
        return _text(choice["message"].get("content") if "message" in choice else choice.get("text"))
    messages = [item for item in response.get("output") or () if item.get("type") == "message"]
    return "".join(_text(item.get("content")) for item in [*messages, response])


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""
