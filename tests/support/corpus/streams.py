"""Streams: cut anywhere, with anything in them, and in time."""

from __future__ import annotations

import json
from collections.abc import Iterable

from support import voice
from support.corpus.case import (
    CHAT,
    DONE,
    HELLO,
    LAST,
    SSE_HEAD,
    STREAM,
    Case,
    chunk,
    delta,
    head,
    post,
    says,
    streamed,
    whole,
)
from support.played import Asked, Do, Script, Step

SHORT = b"".join([voice.sse(delta("é😀")), b": ping\n\n", DONE])
ENDS = {
    "LF": SHORT,
    "CRLF": SHORT.replace(b"\n", b"\r\n"),
    "CR": SHORT.replace(b"\n", b"\r"),
    "mixed": SHORT.replace(b"}\n\n", b"}\r\n\n").replace(b"ping\n\n", b"ping\r\r"),
}


def splits() -> Iterable[Case]:
    """Every position of a short stream between two chunks, in every style of line ends; then one byte at a time."""
    for name, text in ENDS.items():
        for at in range(1, len(text)):
            yield Case(f"{name} cut at {at}", STREAM, says(*streamed(text[:at], text[at:])))
        for size in (1, 2, 3, 5, 7):
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            yield Case(f"{name} in pieces of {size}", STREAM, says(*streamed(*pieces)))


def tcp_splits() -> Iterable[Case]:
    """Every position of a whole raw answer, its head and its chunk sizes included, between two TCP segments."""
    raw = head(200, "Content-Type: text/event-stream", "Transfer-Encoding: chunked") + chunk(DONE) + LAST
    for at in range(1, len(raw)):
        yield Case(f"stream cut at {at}", STREAM, says(raw[:at], raw[at:]))
    raw = whole(b'{"choices":[]}')
    for at in range(1, len(raw)):
        yield Case(f"JSON cut at {at}", CHAT, says(raw[:at], raw[at:]))


def vllm_splits() -> Iterable[Case]:
    """vLLM's stream, in chunks of every size up to 64 and some above."""

    def cut(size: int) -> Script:
        def script(asked: Asked) -> list[Step]:
            text = b"".join(voice.chat_stream(json.loads(asked.body)))
            return streamed(*(text[i : i + size] for i in range(0, len(text), size)))

        return script

    for size in [*range(1, 65), 100, 1000, 100_000]:
        yield Case(f"chunks of {size}", STREAM, cut(size))


EVENTS = {
    "event, id and retry": b"event: x\nid: 7\nretry: 10\n" + voice.sse(delta("a")),
    "no space after the colon": b'data:{"choices":[]}\n\n',
    "two spaces after the colon": b'data:  {"choices":[]}\n\n',
    "data on several lines": b'data: {"choices":\ndata: []}\n\n',
    "a comment in an event": b": x\n" + voice.sse(delta("a")),
    "comments alone": b": a\n\n:\n\n: b\n: c\n\n",
    "empty lines": b"\n\n\n\n" + voice.sse(delta("a")) + b"\n\n",
    "an event without data": b"event: ping\n\n",
    "empty data": b"data:\n\ndata\n\ndata: \n\n",
    "a byte order mark": b"\xef\xbb\xbf" + voice.sse(delta("a")),
    "an unknown field": b"foo: bar\n" + voice.sse(delta("a")),
    "a field like data": b"database: x\n\n",
    "text that is no JSON": b"data: hello\n\n",
    "JSON that is no object": b"data: 5\n\ndata: []\n\ndata: null\n\n",
    "text that is no UTF-8": b"data: \xff\xfe\n\n",
    "a NUL": b"data: \x00\n\n",
    "an error": b'data: {"error": {"message": "boom", "code": 500}}\n\n',
    "an error as an event": b'event: error\ndata: {"error": "boom"}\n\n',
    "an event of 1 MB": voice.sse(delta("x" * 1_000_000)),
    "a thousand events": voice.sse(delta("x")) * 1000,
    "unknown fields": voice.sse(delta("a", unknown={"a": [1, None]}, obfuscation="xxx")),
    "usage in every chunk": voice.sse(delta("a", usage={"total_tokens": 1})),
    "no choices": b'data: {"id": "x"}\n\n',
}


def events() -> Iterable[Case]:
    for name, text in EVENTS.items():
        yield Case(name, STREAM, says(*streamed(text, DONE)))
        yield Case(f"{name}, CRLF", STREAM, says(*streamed(text.replace(b"\n", b"\r\n"), DONE)))
    for done in (b"data:[DONE]\n\n", b"data: [DONE] \r\n\r\n", b"event: done\ndata: [DONE]\n\n", b"data: [DONE]\n"):
        yield Case(f"ends with {done!r}", STREAM, says(*streamed(voice.sse(delta("a")), done)))
    yield Case("goes on after [DONE]", STREAM, says(*streamed(HELLO, b": bye\n\n", voice.sse(delta("more")), b"x")))
    yield Case("[DONE] twice", STREAM, says(*streamed(HELLO, DONE)))
    finish = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    yield Case("whole and no [DONE]", STREAM, says(*streamed(voice.sse(delta("a")), voice.sse(finish))))
    yield Case("an error and no [DONE]", STREAM, says(*streamed(EVENTS["an error"])))
    yield Case("one event a chunk", STREAM, says(*streamed(voice.sse(delta("a")), voice.sse(delta("b")), DONE)))


def in_time() -> Iterable[Case]:
    """The next piece is sent when the agent has the one before: nothing is held back."""
    for name, text in EVENTS.items():
        steps = [
            step for piece in (text, voice.sse(delta("b")), b": ping\n\n") for step in (chunk(piece), Do.UNTIL_SEEN)
        ]
        yield Case(name, STREAM, says(SSE_HEAD, *steps, chunk(DONE), Do.UNTIL_SEEN, LAST))
    lock = [step for _ in range(50) for step in (chunk(voice.sse(delta("t"))), Do.UNTIL_SEEN)]
    yield Case("fifty tokens", STREAM, says(SSE_HEAD, *lock, chunk(DONE), LAST))
    raw = [head(200, "Transfer-Encoding: chunked"), chunk(b"a"), Do.UNTIL_SEEN, chunk(b"b"), Do.UNTIL_SEEN, LAST]
    yield Case("a route that is not recorded", post("audio/speech"), says(*raw))
