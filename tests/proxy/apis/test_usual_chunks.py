"""Chunks that go on unparsed: the agent and the record get the same as if each had been parsed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_proxy.proxy.apis import stream as stream_module
from lightning_proxy.proxy.apis.chat import ChatStream
from lightning_proxy.proxy.apis.inject import Injection
from lightning_proxy.proxy.apis.sse import encode
from lightning_proxy.proxy.apis.stream import Transcript
from lightning_proxy.proxy.json_text import dumps, loads
from support.fuzzing import examples

TOP = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
DONE = encode(b"[DONE]")
TEXTS = st.text(max_size=6) | st.sampled_from(['"logprob":-1,"bytes":', '"}]}', "\\", "\n\n", "é😀", '"choices":['])


def token(text: str, logprob: float = -0.5) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def chunk(delta: dict[str, Any], tokens: list[dict[str, Any]], ids: Any, **changes: Any) -> bytes:
    """A chunk as vLLM 0.32 writes it."""
    choice = {"index": 0, "delta": delta, "logprobs": {"content": tokens}, "finish_reason": None, "token_ids": ids}
    return encode(orjson.dumps(TOP | {"choices": [choice | changes]}))


def first() -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return encode(orjson.dumps(TOP | {"choices": [choice], "prompt_token_ids": [7, 8]}))


def last() -> bytes:
    return chunk({"content": ""}, [token("")], [9], finish_reason="stop") + encode(
        orjson.dumps(TOP | {"choices": [], "usage": USAGE})
    )


def arguments(text: str, index: int = 0, **before: None) -> dict[str, Any]:
    return before | {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


DELTAS = st.one_of(
    *(TEXTS.map(lambda text, name=name: {name: text}) for name in ("content", "reasoning", "refusal")),
    st.builds(arguments, TEXTS, st.integers(0, 2)),
    st.builds(arguments, TEXTS, content=st.none()),
    st.just({}),
    st.just({"content": None}),
    st.just({"content": "a", "reasoning": "b"}),
)
USUAL = st.builds(
    chunk,
    DELTAS,
    st.lists(st.builds(token, TEXTS, st.sampled_from([-0.5, 0.0, -1e-7, -12.25, -9999.0])), max_size=3),
    st.lists(st.integers(0, 2**40), max_size=3) | st.none(),
)
OPENED = [
    {"tool_calls": [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"tool_calls": [{"index": 0, "id": "call_b", "type": "function", "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 1, "id": "", "function": {"name": "g", "arguments": '{"a"'}}]},
    {"tool_calls": [{"id": "call_c", "function": {"arguments": {"a": 1}}}]},
    {"content": [{"type": "text", "text": "part"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "part"}]}]},
    {"role": "", "content": ""},
]
OTHERS = st.sampled_from(
    [
        *(chunk(delta, [token("x")], [1]) for delta in OPENED),
        chunk({"content": "x"}, [], [1], index=1),
        chunk({"content": "x"}, [token("x")], [1], stop_reason=None),
        chunk({"content": "x"}, [token("x") | {"top_logprobs": [token("y")]}], [1]),
        chunk({"content": "x"}, [token("x")], [1]).replace(b"chatcmpl-1", b"chatcmpl-2"),
        chunk({"content": "x"}, [token("x")], [1]).replace(b'"x"', rb'"\u0041\ud83d\/"'),
        chunk({"content": "x"}, [token("x")], [1]).replace(b'"x"', b'"\xff"'),
        chunk({"content": "x"}, [token("x")], [1]).replace(b'"x"', b'"\x01"'),
        chunk({"content": "x"}, [token("x")], [1]).replace(b"[1]", b"[01]"),
        chunk({"content": "x"}, [token("x")], [1]).replace(b",", b", "),
        chunk({"content": "x"}, [token("x")], [1]).replace(b"\n\n", b"\r\n\r\n"),
        chunk({"content": "x"}, [token("x")], [1])[:-1],
        encode(b'{"error":"broken"}'),
        encode(b"{"),
        b": ping\n\n",
        last(),
        DONE,
    ]
)


def followed(pieces: list[bytes], *, parse_all: bool = False) -> tuple[Transcript, bytes]:
    """The transcript of a stream, and all that the agent got of it."""
    chat = ChatStream(Injection(True, True, True))
    if parse_all:
        chat.usual = None
    transcript, sent = Transcript(chat), b""
    for piece in pieces:
        sent += transcript.feed(piece) if not transcript.ended else piece
    if not transcript.ended:
        sent += transcript.end()
    return transcript, sent + transcript.held


def events(sent: bytes) -> list[Any]:
    """The events as values, since an escape may be written in several ways."""
    found = []
    for text in sent.replace(b"\r\n", b"\n").split(b"\n\n"):
        try:
            found.append(loads(text.removeprefix(b"data: ")))
        except ValueError:
            found.append(text)
    return found


@examples(1500)
@given(chunks=st.lists(USUAL | OTHERS, max_size=12), cuts=st.lists(st.integers(0, 4000), max_size=6))
@example(chunks=[chunk({"content": "a"}, [token("a")], [3])] * 3 + [last(), DONE], cuts=[])
@example(chunks=[chunk(arguments('{"a'), [token("a")], [3]), chunk(arguments('":1}'), [token("b")], [4])], cuts=[700])
@example(
    chunks=[
        chunk({"content": "x"}, [token("x")], [1]).replace(b"chatcmpl-1", b"chatcmpl-2"),
        chunk({"content": "x"}, [token("x")], [1]),
    ],
    cuts=[],
)
def test_agent_and_record_get_what_they_get_of_parsed_chunks(chunks: list[bytes], cuts: list[int]) -> None:
    text = first() + b"".join(chunks)
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    (ours, sent), (parsed, sent_parsed) = followed(pieces), followed(pieces, parse_all=True)
    assert events(sent) == events(sent_parsed)
    assert dumps(ours.response()) == dumps(parsed.response())
    assert (ours.tokens.choices, ours.tokens.prompt_token_ids, ours.tokens.usage) == (
        parsed.tokens.choices, parsed.tokens.prompt_token_ids, parsed.tokens.usage,
    )  # fmt: skip
    assert (ours.error, ours.may_end) == (parsed.error, parsed.may_end)


def test_a_usual_chunk_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    loads = stream_module.loads
    monkeypatch.setattr(stream_module, "loads", lambda data: parsed.append(data) or loads(data))
    chunks = [chunk({"content": "é"}, [token("é")], [i]) for i in range(20)]
    transcript, _ = followed([first(), *chunks, last(), DONE])
    assert len(parsed) == 3  # the first, that which ends the answer, and the usage
    assert transcript.response()["choices"][0]["message"]["content"] == "é" * 20
    assert transcript.tokens.choices[0].token_ids == (*range(20), 9)


def test_a_stream_of_other_chunks_is_soon_no_longer_looked_at_for_usual_ones() -> None:
    stream = ChatStream(Injection(True, True, True))
    Transcript(stream).feed(first() + chunk({"content": "x"}, [], [1], stop_reason=None) * 20)
    assert stream.usual is not None
    assert not stream.usual.expected
