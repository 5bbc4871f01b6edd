"""Routes that are not recorded, and methods, paths and bodies of all kinds."""

from __future__ import annotations

from collections.abc import Iterable

from support.corpus.case import ERROR, HELLO, LAST, Case, chunk, get, head, post, says, streamed, whole
from support.played import Asked, Step

FORM = (
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    + bytes(range(256))
    + b'\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B--\r\n'
)


PASSED_ON = ["embeddings", "moderations", "images/generations", "rerank", "score", "messages/count_tokens", "tokenize"]
UPLOADS = ["files", "audio/transcriptions", "audio/translations", "images/edits", "uploads/u/parts", "batches"]
READ = ["chat/completions", "chat/completions/c", "responses/resp_1", "responses/resp_1/input_items?limit=2"]
QUERIES = ["?a=1&b=%20+%2F%C3%A9&c", "?x[]=1&x[]=2", "?a=b?c=d/e:f@g", "?after=%00"]
PATHS = ["files/a%20b", "files/%C3%A9", "files/a%2Bb", "files/a+b", "files/a;b=1", "models/org%2Fname", "files/x/"]
CHUNKED = b"POST /v1/%s HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def echo(asked: Asked) -> list[Step]:
    return [whole(asked.method + b" " + asked.target + b"\n" + asked.body, kind="text/plain")]


def requests() -> Iterable[Case]:
    """Answered with what was asked."""
    for path in UPLOADS:
        yield Case(f"upload to {path}", post(path, FORM, "Content-Type: multipart/form-data; boundary=B"), echo)
    for path in PASSED_ON:
        yield Case(f"POST {path}", post(path, {"input": ["é", [1, 2]], "unknown": 2.50}), echo)
    for method in ("PUT", "DELETE", "PATCH", "POST"):
        yield Case(f"{method} with a body", post("files/x", b"\x00\xff{", method=method), echo)
        yield Case(f"{method} with an empty body", get("files/x", "Content-Length: 0", method=method), echo)
    for method in ("GET", "DELETE", "OPTIONS"):
        yield Case(f"{method} alone", get("files/x", method=method), echo)
    for target in (*READ, *("files" + query for query in QUERIES)):
        yield Case(f"GET {target}", get(target), echo)
    yield Case("chunked upload", CHUNKED % b"files" + chunk(b"a" * 99) + chunk(b"b") + LAST, echo)
    chat = CHUNKED % b"chat/completions" + chunk(b'{"model"') + chunk(b': "m"}') + LAST
    yield Case("chunked chat", chat, says(whole(ERROR, status=400)))


def answers() -> Iterable[Case]:
    for status in (200, 404):
        yield Case(f"HEAD {status}", get("files/x", method="HEAD"), says(head(status, "Content-Length: 5", "X-Up: 1")))
    yield Case("HEAD without a length", get("files/x", method="HEAD"), says(head(200, "X-Up: 1")))
    asked = ("Origin: http://127.0.0.1", "Access-Control-Request-Method: POST")
    allowed = head(204, "Access-Control-Allow-Origin: *", "Allow: POST")
    yield Case("preflight", get("chat/completions", *asked, method="OPTIONS"), says(allowed))
    for path in PATHS:
        yield Case(f"path {path}", get(path), says(whole(b"x")))
    large = whole(bytes(range(256)) * 12_000, kind="application/octet-stream")
    yield Case("a download of 3 MB", get("files/x/content"), says(large))
    pieces = [chunk(bytes([i]) * 999) for i in range(99)]
    yield Case("a download in chunks", get("files/x"), says(head(200, "Transfer-Encoding: chunked"), *pieces, LAST))
    yield Case("events that are not recorded", get("threads/t/runs"), says(*streamed(HELLO)))
    part = whole(b"ab", "Content-Range: bytes 0-1/9", status=206)
    yield Case("a range", get("files/x", "Range: bytes=0-1"), says(part))
