"""Makes the first words of question and answer that a list of rollouts shows. Pure."""

from __future__ import annotations

from typing import Any

from ...core.json_text import loads_or_none
from ...core.tools import dicts
from ...store.reports import Summary, Words
from ..dialects.transcript import called, text
from .transitions import answer_in

WORDS = 200  # characters


def words_view(summary: Summary | None) -> dict[str, Any]:
    """Return the fields that a rollout has in a list with `words`."""
    if summary is None:
        return dict.fromkeys(("question", "answer", "model", "key", "latency_ms", "last_call"))
    return {
        **summary.words._asdict(),
        "model": summary.model,
        "key": summary.key_name,
        "latency_ms": summary.latency_ms,
        "last_call": summary.last_call,
    }


def words_in(request: str | None, response: str | None) -> Words:
    """Return the first words of a first request and a last answer, which are JSON as it is stored."""
    stored = loads_or_none(request) if request else None
    asked = stored.get("new") if isinstance(stored, dict) else None
    return Words(_first_words(_question(asked)), _first_words(_answer(loads_or_none(response))))


def _question(request: Any) -> str:
    """The text of the last user's message of a request of any API."""
    if not isinstance(request, dict):
        return ""
    asked = next((request[name] for name in ("messages", "input", "prompt") if request.get(name)), "")
    if isinstance(asked, str):
        return asked
    messages = dicts(asked)
    users = [message for message in messages if message.get("role") == "user"]
    return text((users or messages or [{}])[-1])


def _answer(response: Any) -> str:
    """The text of an answer of any API, or the tools that it calls."""
    found = answer_in(response)
    if isinstance(found, str):
        return found
    messages = dicts(found.get("output")) or [found] if isinstance(found, dict) else []
    said = "\n".join(filter(None, map(text, messages)))
    tools = [one for message in messages for one in (*called(message), *_calls(message))]
    return said if not tools else f"{said} {', '.join(str(tool.get('name')) for tool in tools)}(…)"


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of Messages and Responses."""
    kinds = ("tool_use", "function_call")
    parts = [message, *dicts(message.get("content"))]
    return [part for part in parts if part.get("type") in kinds]


def _first_words(words: str) -> str | None:
    return " ".join(words[: 4 * WORDS].split())[:WORDS] or None
