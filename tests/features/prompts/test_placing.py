"""Where an agent's prompt stands in a request, by API."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_proxy.features.prompts.proxy import find, put, text_at

BLOCK = {"type": "text", "text": "be brief"}
USER = {"role": "user", "content": "hi"}
CASES: list[tuple[str, dict[str, Any], str, tuple[Any, ...] | None]] = [
    ("chat/completions", {"messages": [{"role": "system", "content": "be brief"}, USER]}, "system",
     ("messages", 0, "content")),
    ("chat/completions", {"messages": [{"role": "developer", "content": "be brief"}]}, "system",
     ("messages", 0, "content")),
    ("chat/completions", {"messages": [USER, {"role": "system", "content": [BLOCK]}]}, "system",
     ("messages", 1, "content", 0, "text")),
    ("chat/completions", {"messages": [{"role": "system", "content": [BLOCK, BLOCK]}]}, "system", None),
    ("chat/completions", {"messages": [USER]}, "system", None),
    ("chat/completions", {"messages": "hi"}, "user", None),
    ("chat/completions", {"messages": ["hi", {"role": "user", "content": "be brief"}]}, "user",
     ("messages", 1, "content")),
    ("messages", {"system": "be brief", "messages": [USER]}, "system", ("system",)),
    ("messages", {"system": [BLOCK], "messages": [USER]}, "system", ("system", 0, "text")),
    ("messages", {"messages": [{"role": "user", "content": [BLOCK]}]}, "user", ("messages", 0, "content", 0, "text")),
    ("responses", {"instructions": "be brief", "input": "hi"}, "system", ("instructions",)),
    ("responses", {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}]}, "system",
     ("input", 0, "content", 0, "text")),
    ("responses", {"input": "be brief"}, "user", ("input",)),
    ("completions", {"prompt": "be brief"}, "user", ("prompt",)),
    ("completions", {"prompt": [1, 2]}, "user", None),
    ("responses", {"previous_response_id": "r", "input": "be brief"}, "user", None),
    ("responses", {"conversation": "c", "input": "be brief"}, "user", None),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "request_", "role", "place"), CASES)
def test_a_prompt_is_found_and_replaced(
    endpoint: str, request_: dict[str, Any], role: Any, place: tuple[Any, ...] | None
) -> None:
    assert find(endpoint, request_, role) == place
    if place is not None:
        before = repr(request_)
        assert text_at(request_, place) == "be brief"
        changed = put(request_, place, "be long")
        assert text_at(changed, place) == "be long" and put(changed, place, "be brief") == request_
        assert repr(request_) == before
