"""Upstreams that break off, stall, or answer garbage."""

from __future__ import annotations

import json
from collections.abc import Iterable

from support import voice
from support.corpus.case import (
    ANSWER,
    CHAT,
    DONE,
    ERROR,
    HELLO,
    LAST,
    SSE_HEAD,
    STREAM,
    Case,
    chunk,
    delta,
    get,
    head,
    post,
    says,
    whole,
)
from support.played import Asked, Do, Script, Step


def broken() -> Iterable[Case]:
    first = voice.sse(delta("a"))
    for how in (Do.CLOSE, Do.RESET):
        yield Case(f"{how.name} before the head", CHAT, says(how))
        yield Case(f"{how.name} in the status line", CHAT, says(b"HTTP/1.1 2", how))
        yield Case(f"{how.name} in the head", CHAT, says(head(200)[:-2], b"Content-Le", how))
        yield Case(f"{how.name} after the head", CHAT, says(head(200, "Content-Length: 9"), how))
        yield Case(f"{how.name} in the body", CHAT, says(whole(ANSWER)[:-9], how))
        yield Case(f"{how.name} in an error's body", CHAT, says(whole(ERROR, status=500)[:-9], how))
        yield Case(
            f"{how.name} in a chunked body", CHAT, says(head(200, "Transfer-Encoding: chunked"), chunk(b"{}"), how)
        )
        yield Case(f"{how.name} in a stream's head", STREAM, says(SSE_HEAD[:-2], how))
        yield Case(f"{how.name} before the first event", STREAM, says(SSE_HEAD, how))
        yield Case(f"{how.name} between events", STREAM, says(SSE_HEAD, chunk(first), Do.UNTIL_SEEN, how))
        yield Case(f"{how.name} in a chunk's size", STREAM, says(SSE_HEAD, chunk(first), Do.UNTIL_SEEN, b"4", how))
        yield Case(
            f"{how.name} in a chunk", STREAM, says(SSE_HEAD, chunk(first), Do.UNTIL_SEEN, chunk(first)[:-20], how)
        )
        yield Case(
            f"{how.name} in an event", STREAM, says(SSE_HEAD, chunk(first), Do.UNTIL_SEEN, chunk(first[:-9]), how)
        )
        yield Case(f"{how.name} before [DONE]", STREAM, says(SSE_HEAD, chunk(HELLO[: -len(DONE)]), Do.UNTIL_SEEN, how))
        yield Case(f"{how.name} in [DONE]", STREAM, says(SSE_HEAD, chunk(HELLO[:-6]), Do.UNTIL_SEEN, how))
        yield Case(
            f"{how.name} after [DONE], without the last chunk", STREAM, says(SSE_HEAD, chunk(HELLO), Do.UNTIL_SEEN, how)
        )
        yield Case(f"{how.name} in the last chunk", STREAM, says(SSE_HEAD, chunk(HELLO), Do.UNTIL_SEEN, b"0\r\n", how))
        yield Case(f"{how.name} in a route that is not recorded", post("embeddings"), says(whole(b"x" * 99)[:-9], how))
        yield Case(
            f"{how.name} in a download",
            get("files/x"),
            says(head(200, "Transfer-Encoding: chunked"), chunk(b"x" * 99), Do.UNTIL_SEEN, how),
        )
        yield Case(f"{how.name} before the head of a download", get("files/x"), says(how))
    yield Case("a stream with its length, cut", STREAM, says(whole(HELLO, kind="text/event-stream")[:-20], Do.CLOSE))
    yield Case("garbage in place of a head", CHAT, says(b"SSH-2.0-x\r\n", Do.CLOSE))
    garbage = [SSE_HEAD, chunk(first), Do.UNTIL_SEEN, b"zz\r\n"]
    yield Case("garbage in place of a chunk's size", STREAM, says(*garbage, Do.CLOSE))
    yield Case("garbage in place of a chunk's size, and silence", STREAM, says(*garbage, Do.HANG))
    yield Case("a chunk longer than its size", STREAM, says(SSE_HEAD, b"3\r\n" + first + b"\r\n", LAST, Do.HANG))
    yield Case("a negative length", CHAT, says(head(200, "Content-Length: -1"), b"{}", Do.CLOSE))
    yield Case("two lengths", CHAT, says(head(200, "Content-Length: 2", "Content-Length: 3"), b"{}", Do.CLOSE))


def broken_dialects() -> Iterable[Case]:
    """vLLM's streams, cut after each of their events, in all recorded APIs."""

    def cut(after: int) -> Script:
        def script(asked: Asked) -> list[Step]:
            path = asked.target.decode().removeprefix("/v1/")
            # Where it comes depends on what was asked for.
            frames = [f.replace(b',"system_fingerprint":"fp"', b"") for f in voice.STREAM[path](json.loads(asked.body))]
            return [SSE_HEAD, *map(chunk, frames[:after]), Do.CLOSE]

        return script

    for path in voice.STREAM:
        for after in range(len(voice.STREAM[path]({"stream": True}))):
            yield Case(f"{path} after {after} events", post(path, {"stream": True}), cut(after))


def stalls() -> Iterable[Case]:
    """To the model of an upstream that the proxy gives little time."""
    first = voice.sse(delta("a"))
    chat, stream = (post(body={"model": "hurried", "messages": [], "stream": streamed}) for streamed in (False, True))
    yield Case("before the head", chat, says(Do.HANG))
    yield Case("in the head", chat, says(b"HTTP/1.1 200 OK\r\n", Do.HANG))
    yield Case("in the body", chat, says(whole(ANSWER)[:-9], Do.HANG))
    yield Case("before the first event", stream, says(SSE_HEAD, Do.HANG))
    yield Case("between events", stream, says(SSE_HEAD, chunk(first), Do.HANG))
    yield Case("in an event", stream, says(SSE_HEAD, chunk(first), chunk(first)[:-9], Do.HANG))
    yield Case("in [DONE]", stream, says(SSE_HEAD, chunk(HELLO)[:-9], Do.HANG))
    yield Case("after [DONE]", stream, says(SSE_HEAD, chunk(HELLO), Do.HANG))
    yield Case(
        "in an answer that is not recorded",
        post("embeddings", {"model": "hurried"}),
        says(whole(b"x" * 99)[:-9], Do.HANG),
    )
