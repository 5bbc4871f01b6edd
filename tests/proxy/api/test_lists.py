"""The first words of a rollout, which a list shows, are found in requests and answers of every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_proxy.proxy.api.views import words_in

USER = {"role": "user", "content": "a  b"}
ASKED = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "x"}, USER]
PARTS = [{"role": "user", "content": [{"type": "input_text", "text": "a b"}]}]
CALL = {"function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("request_", "response", "question", "answer"),
    [
        ({"messages": ASKED}, {"choices": [{"message": {"role": "assistant", "content": "c"}}]}, "a b", "c"),
        ({"messages": ASKED}, {"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}, "a b", "add(…)"),
        ({"prompt": "a b"}, {"choices": [{"text": "c"}]}, "a b", "c"),
        ({"input": PARTS}, {"output": [{"content": [{"type": "output_text", "text": "c"}]}]}, "a b", "c"),
        ({"messages": PARTS, "system": "s"}, {"content": [{"type": "text", "text": "c"}]}, "a b", "c"),
        ({"messages": 5}, {"choices": [7]}, "5", None),
        ([], None, None, None),
        ({"messages": [{"role": "user", "content": "x" * 999}]}, {}, "x" * 200, None),
    ],
)  # fmt: skip
def test_the_first_words_of_every_api_are_found(request_: Any, response: Any, question: Any, answer: Any) -> None:
    assert words_in(json.dumps({"new": request_}), json.dumps(response)) == (question, answer)
