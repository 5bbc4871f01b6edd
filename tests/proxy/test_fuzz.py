"""Whatever JSON an agent or an upstream sends: it is recorded, never an error of the proxy's own."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_proxy.core.errors import InvalidRequest
from lightning_proxy.core.json_text import dumps, with_model
from lightning_proxy.core.records import CallEnd, CallStart, RolloutName
from lightning_proxy.core.sse import encode
from lightning_proxy.core.tools import conversation, results_in, tool_calls, written_results
from lightning_proxy.proxy.gateway.relay import DIALECTS, parse_object
from lightning_proxy.proxy.gateway.unnamed import Conversation, end_statements, start_statements
from support.calls import stored_and_read
from support.fuzzing import examples

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
# The names that the code looks at, so that the values behind them are strange rather than missing.
NAMES_TEXT = """
arguments bytes call_id choices content content_block delta echo enable_response_messages error
finish_reason function id include incomplete_details index input input_messages instructions item
logprob logprobs message messages model n name output output_index output_messages part partial_json
previous_response_id prompt prompt_token_ids reason response role status stop_reason stream
stream_options system temperature text token token_ids token_logprobs tokens tool_call_id tool_calls
tool_use_id tools top_logprobs type usage
"""
NAMES = st.sampled_from(NAMES_TEXT.split())
WORDS_TEXT = """
assistant user tool system developer message function_call function_call_output output_text text
tool_use tool_result message_start message_delta message_stop content_block_start
content_block_delta error response.created response.completed response.failed
response.output_item.done response.content_part.added stop {} [1] x
"""
WORDS = st.sampled_from(WORDS_TEXT.split())


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(NAMES, values, max_size=6)


LEAVES = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | objects(inner), max_leaves=25)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=8)
# Events of a stream that is strange only in its details.
TYPES_TEXT = """
message_start message_delta message_stop content_block_start content_block_delta
response.created response.completed response.output_item.done
"""
DETAILS = {"delta": JSON, "usage": JSON, "message": OBJECTS, "content_block": OBJECTS, "response": OBJECTS}
TYPED = st.fixed_dictionaries({"type": st.sampled_from(TYPES_TEXT.split()), "index": st.just(0)}, optional=DETAILS)
BEGUN = {"type": "message_start", "message": {"usage": 3}}


@examples(200)
@given(request=OBJECTS, answer=OBJECTS, path=st.sampled_from(sorted(DIALECTS)))
@example(request={}, answer={"output_messages": [{"tokens": 5}], "input_messages": [{"tokens": 5}]}, path=RESPONSES)
@example(request={}, answer={"output": [{"content": [{"type": "output_text", "logprobs": 5}]}]}, path=RESPONSES)
def test_whole_answers(request: dict[str, Any], answer: dict[str, Any], path: str) -> None:
    dialect, asked = DIALECTS[path], copy.deepcopy(request)
    _, injection = dialect.inject(request)
    assert request == asked, "the record is of what the agent sent"
    tokens = dialect.tokens(answer)
    dialect.agents(answer, injection)
    reason = tokens.untrainable_reason("ok", request)
    if reason is None:
        assert all(len(c.token_ids) == len(c.logprobs) > 0 for c in tokens.choices)
    dumps([call.arguments for call in tool_calls(answer)])
    items = conversation(request)
    [*written_results(items), *(result for item in items for result in results_in(item))]


@examples(200)
@given(request=OBJECTS, events=st.lists(OBJECTS | TYPED, max_size=6), path=st.sampled_from(sorted(DIALECTS)))
@example(request={}, events=[BEGUN, {"type": "message_delta", "delta": "x", "usage": [1]}], path=MESSAGES)
@example(request={}, events=[BEGUN, {"type": "message_delta", "usage": {"output_tokens": 1}}], path=MESSAGES)
@example(
    request={},
    events=[
        BEGUN,
        {"type": "content_block_start", "index": 0, "content_block": {"citations": 5}},
        {"type": "content_block_delta", "index": 0, "delta": {"citation": 1}},
    ],
    path=MESSAGES,
)
@example(request={}, events=[{"type": ["message_start"]}], path=MESSAGES)
def test_streamed_answers(request: dict[str, Any], events: list[dict[str, Any]], path: str) -> None:
    dialect = DIALECTS[path]
    _, injection = dialect.inject(request)
    transcript = dialect.stream(injection)
    fed = sent = b""
    for event in events:
        if not transcript.ended:
            fed += encode(orjson.dumps(event))
            sent += transcript.feed(encode(orjson.dumps(event)))
    sent += transcript.end() + transcript.held
    if not injection:
        assert sent == fed, "nothing was asked for on top, so nothing is changed"
    assert sent.count(b"\n\n") <= fed.count(b"\n\n"), "no event is made up"
    response = transcript.response()
    dumps(response)
    tool_calls(response)
    transcript.tokens.untrainable_reason("ok", request)


@examples(150)
@given(before=OBJECTS, request=OBJECTS, answer=OBJECTS)
def test_conversations_and_what_is_stored_of_them(
    before: dict[str, Any], request: dict[str, Any], answer: dict[str, Any]
) -> None:
    for body in (before, request):
        start = CallStart("c", RolloutName("r", named=False), "chat/completions", "m", 0, body, 0.0)
        conversation = Conversation("k", start.rollout, body)
        assert len(start_statements(start, conversation)) == 1
        list(end_statements(start, conversation, CallEnd("c", "r", "ok", answer, 200)))
    assert stored_and_read(request, before) == request


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        (b'{ "model" : "policy",  "n": 123456789012345678901234567890, "t":1.0e0 }',
         b'{ "model" : "base",  "n": 123456789012345678901234567890, "t":1.0e0 }'),
        (b'{"messages":[{"content":"\\"model\\": \\"policy\\""}],"model":"a\\"b"}',
         b'{"messages":[{"content":"\\"model\\": \\"policy\\""}],"model":"base"}'),
        (b'{"model":"policy","metadata":{"model":"policy"}}', None),
        (b'{"m\\u006fdel":"policy","metadata":{"model":"policy"}}', None),
        (b'{"model":null}', None),
        (b'{"m":1,"metadata":["model"]}', None),
    ],
)  # fmt: skip
def test_a_model_is_renamed_and_nothing_else_touched(text: bytes, renamed: bytes | None) -> None:
    pieces = with_model(text, "base")
    assert (pieces and b"".join(pieces)) == renamed


@examples(300)
@given(rest=OBJECTS, old=st.text(), new=st.text(), ascii_only=st.booleans(), space=st.booleans())
def test_a_text_whose_model_is_renamed_says_what_its_object_would(
    rest: Any, old: str, new: str, ascii_only: bool, space: bool
) -> None:
    body = rest | {"model": old}
    text = json.dumps(body, ensure_ascii=ascii_only, indent=1 if space else None).encode()
    if (renamed := with_model(text, new)) is not None:
        assert json.loads(b"".join(renamed)) == body | {"model": new}
    else:
        assert b"\\u00" in text or text.count(b'"model"') > 1


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_body_that_is_not_utf8_is_refused_whatever_its_size(size: int) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_object(b'{"x":"\xed\xa0\x80' + b"a" * size + b'"}')
