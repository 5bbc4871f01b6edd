"""Whatever bytes arrive, cut anywhere: they go on as they came, and nothing raises."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lightning_proxy.core.json_text import dumps, loads
from lightning_proxy.core.sse import Frame, SSEDecoder
from lightning_proxy.proxy.dialects.stream import Injection
from lightning_proxy.proxy.gateway.relay import DIALECTS
from support.fuzzing import examples

# What a stream is made of, whole and in halves.
PIECES = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b"\n\n", b"data", b"data:", b"data: ", b": ping", b"event: x", b"[DONE]", b"\xef\xbb\xbf",
     b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}', b'{"type": "message_stop"}', b'{"error": "x"}',
     b'{"type": "response.completed", "response": {}}', b"{", b"}", b"null", b"\xc3", b"\xa9", b"\x00"]
)  # fmt: skip
STREAMS = st.lists(PIECES | st.binary(max_size=5), max_size=30).map(b"".join)
CUTS = st.lists(st.integers(0, 200), max_size=12)


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[a:b] for a, b in pairwise(places)]


def frames(pieces: list[bytes]) -> list[Frame]:
    decoder = SSEDecoder()
    found = [frame for piece in pieces for frame in decoder.feed(piece)]
    assert decoder.pending == len(decoder.rest)
    return [*found, decoder.close()]


@examples(1000)
@given(text=STREAMS, cuts=CUTS)
@example(text=b"data: a\r\n\r\n\ndata: b\n\n", cuts=[10])
def test_frames_are_the_same_wherever_a_stream_is_cut(text: bytes, cuts: list[int]) -> None:
    whole, pieces = frames([text]), frames(cut(text, cuts))
    assert b"".join(frame.raw for frame in pieces) == text
    assert [f.data for f in pieces if f.data is not None] == [f.data for f in whole if f.data is not None]


@pytest.mark.parametrize("path", sorted(DIALECTS))
@examples(300)
@given(text=STREAMS, cuts=CUTS)
def test_a_stream_that_nothing_was_injected_into_goes_on_as_it_came(path: str, text: bytes, cuts: list[int]) -> None:
    transcript = DIALECTS[path].stream(Injection())
    sent = b""
    for piece in cut(text, cuts):
        sent += transcript.feed(piece) if not transcript.ended else piece
    if not transcript.ended:
        sent += transcript.end() + transcript.held
        assert sent == text
    dumps(transcript.response())
    transcript.tokens.untrainable_reason("ok", {})


@pytest.mark.parametrize("path", sorted(DIALECTS))
@examples(300)
@given(text=STREAMS, cuts=CUTS)
def test_a_stream_that_something_was_injected_into_makes_nothing_up(path: str, text: bytes, cuts: list[int]) -> None:
    transcript = DIALECTS[path].stream(Injection(True, True, True))
    for piece in cut(text, cuts):
        if not transcript.ended:
            assert len(transcript.feed(piece)) <= 2 * len(text) + 100
    transcript.end()
    dumps(transcript.response())


@examples(1000)
@given(text=st.binary(max_size=40) | st.lists(PIECES).map(b"".join) | st.text(max_size=20).map(str.encode))
@example(text=b'"\\ud800"')
@example(text=b"[" * 100_000)
@example(text=b"1" * 5000)
@example(text=b'{"a": 1, "a": 2}')
def test_json_is_read_as_what_can_be_written_again_or_refused(text: bytes) -> None:
    try:
        value = loads(text)
    except ValueError:
        return
    assume("Infinity" not in json.dumps(value))  # 1e999: a number that no double holds is written as null
    assert loads(dumps(value)) == value
