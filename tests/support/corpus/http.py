"""Statuses, headers, encodings."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import brotli

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
    streamed,
    whole,
)
from support.played import Do


def statuses() -> Iterable[Case]:
    for status in range(400, 600):
        yield Case(f"{status} JSON", CHAT, says(whole(ERROR, status=status)))
    for status in (400, 401, 404, 429, 500, 503, 529):
        yield Case(f"{status} HTML", CHAT, says(whole(b"<h1>no</h1>", status=status, kind="text/html")))
        yield Case(f"{status} empty", CHAT, says(whole(b"", status=status)))
        yield Case(f"{status} asked as a stream", STREAM, says(whole(ERROR, status=status)))
        yield Case(f"{status} as a stream", STREAM, says(SSE_HEAD.replace(b"200", b"%d" % status), chunk(HELLO), LAST))
        yield Case(f"{status} not recorded", post("embeddings"), says(whole(ERROR, status=status)))
    waits = ("Retry-After: 7", "retry-after-ms: 12", "x-should-retry: false", "x-ratelimit-remaining: 0")
    yield Case("429 with waits", CHAT, says(whole(ERROR, *waits, status=429)))
    yield Case("503 with a date", CHAT, says(whole(ERROR, "Retry-After: Wed, 21 Oct 2015 07:28:00 GMT", status=503)))
    for status in (200, 201, 202, 203, 206, 207, 226):
        yield Case(f"{status} JSON", CHAT, says(whole(ANSWER, status=status)))
    for status in (204, 205, 304):
        for request in (CHAT, post("embeddings"), get("files/x")):
            yield Case(
                f"{status} {request[:20]!r}",
                request,
                says(head(status, "X-Up: 1", *["Content-Length: 0"][: status == 205])),
            )
    yield Case(
        "304 with the length of what is not sent", get("files/x"), says(head(304, "ETag: x", "Content-Length: 5"))
    )
    for status in (301, 302, 303, 307, 308):
        for request in (CHAT, get("files/x")):
            yield Case(
                f"{status} {request[:20]!r}", request, says(whole(b"x", "Location: http://other/", status=status))
            )


HEADERS: dict[str, list[str]] = {
    "several cookies": ["Set-Cookie: a=1; Path=/", "Set-Cookie: b=2", "set-cookie: a=3"],
    "a header twice": ["X-A: 1", "X-A: 2", "x-a: 3"],
    "an empty header": ["X-Empty:", "X-Space: "],
    "Latin-1": ["X-Name: caf\xe9"],
    "server and date": ["Server: nginx/1.0", "Date: Wed, 21 Oct 2015 07:28:00 GMT", "Via: 1.1 x"],
    "what is for this connection": ["Connection: X-Hop, keep-alive", "X-Hop: 1", "Keep-Alive: timeout=5", "X-Stays: 1"],
    "a header of 4 KB": ["X-Big: " + "x" * 4_000],
    "a header of 7 KB": ["X-Big: " + "x" * 7_000],
    "a header of 30 KB": ["X-Big: " + "x" * 30_000],
    "100 headers": [f"X-{i}: {i}" for i in range(100)],
    "500 headers": [f"X-{i}: {i}" for i in range(500)],
    "security": ["Strict-Transport-Security: max-age=1", "Content-Security-Policy: default-src 'none'", 'ETag: W/"x"'],
    "CORS": ["Access-Control-Allow-Origin: *", "Access-Control-Expose-Headers: *", "Vary: Origin"],
    "OpenAI's": ["openai-organization: o", "openai-processing-ms: 5", "x-request-id: req_1", "openai-version: 2020"],
    "quotes and commas": ['X-Q: a, "b, c"; d=1', "Cache-Control: no-cache, no-store"],
}


def headers() -> Iterable[Case]:
    for name, lines in HEADERS.items():
        yield Case(f"{name}, recorded", CHAT, says(whole(ERROR, *lines, status=400)))
        stream = SSE_HEAD[:-2] + "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        yield Case(f"{name}, streamed", STREAM, says(stream, chunk(HELLO), LAST))
        yield Case(f"{name}, not recorded", post("embeddings"), says(whole(b"{}", *lines)))
        if name not in ("what is for this connection", "Latin-1", "server and date"):
            yield Case(f"{name}, asked", post("chat/completions", None, *lines), says(whole(ERROR, status=400)))
    yield Case(
        "chunked JSON",
        CHAT,
        says(head(200, "Content-Type: application/json", "Transfer-Encoding: chunked"), chunk(b"{"), chunk(b"}"), LAST),
    )
    yield Case(
        "JSON until the connection closes", CHAT, says(head(200, "Content-Type: application/json"), b"[]", Do.CLOSE)
    )
    yield Case(
        "a stream until the connection closes",
        STREAM,
        says(head(200, "Content-Type: text/event-stream"), HELLO, Do.CLOSE),
    )
    yield Case("HTTP/1.0", CHAT, says(whole(b"[]").replace(b"HTTP/1.1", b"HTTP/1.0"), Do.CLOSE))
    yield Case("Connection: close", CHAT, says(whole(b"[]", "Connection: close"), Do.CLOSE))
    yield Case("a stream with its length", STREAM, says(whole(HELLO, kind="text/event-stream")))
    yield Case("chunk extensions", STREAM, says(SSE_HEAD, b"%x;a=b\r\n%s\r\n" % (len(HELLO), HELLO), LAST))
    yield Case("trailers", STREAM, says(SSE_HEAD, chunk(HELLO), b"0\r\nX-Checksum: 1\r\n\r\n"))
    yield Case("no content type", CHAT, says(head(200, "Content-Length: 2") + b"[]"))
    yield Case(
        "a stream that says it is JSON",
        STREAM,
        says(head(200, "Content-Type: application/json", f"Content-Length: {len(HELLO)}") + HELLO),
    )
    for interim in (
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n",
    ):
        yield Case(f"{interim[9:12].decode()} first", CHAT, says(interim, whole(ERROR, status=400)))
        yield Case(f"{interim[9:12].decode()} twice, streamed", STREAM, says(interim, interim, *streamed(HELLO)))
    yield Case(
        "the agent expects 100", post("chat/completions", None, "Expect: 100-continue"), says(whole(ERROR, status=400))
    )


PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress, "deflate": zlib.decompress, "br": brotli.decompress
}  # fmt: skip


def _flushed(pack: Any, add: Callable[[bytes], bytes], flush: Callable[[], bytes]) -> list[bytes]:
    return [add(voice.sse(delta(text))) + flush() for text in "abc"] + [add(DONE) + pack()]


_GZIP, _ZLIB, _BR = zlib.compressobj(wbits=31), zlib.compressobj(), brotli.Compressor()
PIECES = {
    "gzip": _flushed(_GZIP.flush, _GZIP.compress, lambda: _GZIP.flush(zlib.Z_SYNC_FLUSH)),
    "deflate": _flushed(_ZLIB.flush, _ZLIB.compress, lambda: _ZLIB.flush(zlib.Z_SYNC_FLUSH)),
    "br": _flushed(_BR.finish, _BR.process, _BR.flush),
}


def compressed() -> Iterable[Case]:
    """Recorded calls are asked for as they are; what comes compressed nevertheless arrives as what it says."""
    for name, pack in PACK.items():
        encoding = f"Content-Encoding: {name}"
        yield Case(f"{name} JSON unasked", CHAT, says(whole(pack(ERROR), encoding)))
        yield Case(f"{name} error unasked", CHAT, says(whole(pack(ERROR), encoding, status=500)))
        sse = SSE_HEAD[:-2] + encoding.encode() + b"\r\n\r\n"
        yield Case(f"{name} stream unasked", STREAM, says(sse, chunk(pack(HELLO)), LAST))
        lock = [step for piece in PIECES[name] for step in (chunk(piece), Do.UNTIL_SEEN)]
        yield Case(f"{name} stream unasked, in time", STREAM, says(sse, *lock, LAST))
        yield Case(
            f"{name} passed on",
            post("embeddings", None, f"Accept-Encoding: {name}"),
            says(whole(pack(b"{}"), encoding)),
        )
    yield Case(
        "zstd passed on",
        post("embeddings", None, "Accept-Encoding: zstd"),
        says(whole(b"\x28\xb5", "Content-Encoding: zstd")),
    )
    yield Case("identity said", CHAT, says(whole(ERROR, "Content-Encoding: identity")))
    yield Case("an unknown encoding", CHAT, says(whole(b"\x00\xff", "Content-Encoding: own")))
    for accept in ("gzip", "gzip, deflate, br", "identity", "*;q=0"):
        yield Case(
            f"accepts {accept}",
            post("chat/completions", None, f"Accept-Encoding: {accept}"),
            says(whole(ERROR, status=400)),
        )
