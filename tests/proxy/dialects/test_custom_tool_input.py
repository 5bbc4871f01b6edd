"""The input of a custom tool, read out of arguments that come in pieces, is what all of them together say so far."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_proxy.proxy.dialects.as_chat.responses_answer import OpenCall, ResponsesReply
from lightning_proxy.proxy.dialects.as_chat.responses_items import Tools
from support.fuzzing import examples

BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*("(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*)', re.DOTALL)
LETTERS = ["a", " ", "\n", "é", "😀", "\x00"]
ESCAPES = ["\\n", '\\"', "\\\\", "\\u00e9", "\\ud83d", "\\ude00", "\\x"]


def begun_input(arguments: str) -> str:
    """The same, read from the beginning."""
    begun = BEGUN.match(arguments.rstrip())
    try:
        text: str = json.loads(begun[1] + '"') if begun else ""
    except ValueError:
        return ""
    return text[:-1] if "\ud800" <= text[-1:] <= "\udbff" else text


def deltas(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith(".delta"))


@examples(1000)
@given(
    opening=st.sampled_from(['{"input": "', ' {\n"input" :"', '{"other": "', "plain "]),
    inner=st.lists(st.sampled_from(LETTERS + ESCAPES), max_size=12).map("".join),
    closing=st.sampled_from(['"}', '", "more": "x"}', ""]),
    cuts=st.lists(st.integers(0, 60), max_size=10),
)
@example('{"input": "', "\\ud83d\\ude00", '"}', [11, 13, 17, 18, 20, 22])
@example('{"input": "', "a  \\n  b", '"}', [12, 13, 14, 15, 17, 18])
def test_what_is_told_of_it_after_each_piece(opening: str, inner: str, closing: str, cuts: list[int]) -> None:
    arguments = opening + inner + closing
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    call = OpenCall(
        0, ResponsesReply({}, Tools([{"type": "custom", "name": "patch"}])), 0, {"function": {"name": "patch"}}
    )
    before = ""
    for start, end in pairwise(places):
        now = begun_input(arguments[:end])
        assert deltas(call.add(arguments[start:end])) == now.removeprefix(before)
        before = now
    whole = call.close()[-1]["item"]["input"]
    assert whole == (json.loads(arguments)["input"] if _is_valid(arguments) else arguments)


def _is_valid(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments).get("input"), str)
    except (ValueError, AttributeError):
        return False
