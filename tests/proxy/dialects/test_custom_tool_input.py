"""The input of a custom tool, read out of arguments that come in pieces, is what all of them together say."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_proxy.proxy.dialects.as_chat.responses import ResponsesTranslator
from support.fuzzing import examples

LETTERS = ["a", " ", "\n", "é", "😀", "\x00"]
ESCAPES = ["\\n", '\\"', "\\\\", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\x"]


@examples(1000)
@given(
    opening=st.sampled_from(['{"input": "', ' {\n"input" :"', '{"other": "', "plain "]),
    inner=st.lists(st.sampled_from(LETTERS + ESCAPES), max_size=12).map("".join),
    closing=st.sampled_from(['"}', '", "more": "x"}', ""]),
    cuts=st.lists(st.integers(0, 60), max_size=10),
)
@example('{"input": "', "\\ud83d\\ude00", '"}', [11, 13, 17, 18, 20, 22])
@example('{"input": "', "a  \\n  b", '"}', [12, 13, 14, 15, 17, 18])
def test_the_deltas_are_the_input(opening: str, inner: str, closing: str, cuts: list[int]) -> None:
    arguments = opening + inner + closing
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    events = ResponsesTranslator({"model": "m", "input": "x", "tools": [{"type": "custom", "name": "patch"}]})
    pieces = [{"arguments": arguments[start:end]} for start, end in pairwise(places)]
    calls = [{"index": 0, "id": "c", "function": {"name": "patch"}}, *({"index": 0, "function": one} for one in pieces)]
    chunks = [{"created": 1, "model": "m", "choices": [{"delta": {"tool_calls": [call]}}]} for call in calls]
    early = [event for chunk in chunks for event in events.feed(chunk)]
    *late, last = events.end()
    whole = json.loads(arguments)["input"] if _is_valid(arguments) else arguments
    deltas = [[event["delta"] for event in part if "delta" in event] for part in (early, late)]
    assert last["response"]["output"][0]["input"] == whole
    if _is_valid(arguments):
        assert "".join([*deltas[0], *deltas[1]]) == whole
        assert not deltas[1], "all of it was certain before the end"
    else:
        assert deltas[1][-1:] in ([whole], []) and (deltas[1] or not whole)


def _is_valid(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments).get("input"), str)
    except (ValueError, AttributeError):
        return False
