"""Requests and what upstreams answer them, as data: what an agent must see through the proxy as it sees it directly.

`FAMILIES`: cases by name. A case is a request's bytes and a script; most scripts do not look at the request; vLLM's
own dialects are shaped by it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import brotli
import orjson
from traffic.server import MESSAGES, RESPONSES, stream

from support.played import Asked, Do, Script, Step

Json = dict[str, Any]

# What vLLM 0.32 answers, shaped by what it is asked for: the fields that are null without asking, and the bytes.

TEXT = ["h", "é", " 😀", "\n", '"', "\u2028", "it goes on for a while"]
OBJECT = ['{"a":', " true", "}"]
USAGE = {"prompt_tokens": 3, "total_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": None}
PROMPT = [1, 2, 3]
DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """As vLLM's server encodes whole answers."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def sse(value: Any) -> bytes:
    """As it encodes chunks: other digits for small floats."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def chat(body: Json) -> Json:
    """The whole answer of /v1/chat/completions."""
    tools, pieces, asks = _tools(body), _pieces(body), body.get("return_token_ids")
    message = {"role": "assistant", "content": None if tools else "".join(pieces), "refusal": None, "tool_calls": tools}
    choices = [
        {
            "index": index, "message": message, "logprobs": _logprobs(body, pieces), "finish_reason": _finish(body),
            "stop_reason": None, "token_ids": [100 * index + i for i in range(len(pieces))] if asks else None,
        }
        for index in range(body.get("n") or 1)
    ]  # fmt: skip
    top = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "base", "choices": choices}
    top |= {"unknown": {"kept": [1, None, 2.5]}, "prompt_token_ids": PROMPT if asks else None}
    return top | {"usage": USAGE, "prompt_logprobs": None, "kv_transfer_params": None}


def chat_stream(body: Json) -> list[bytes]:
    """The frames of a streamed /v1/chat/completions, [DONE] included."""
    top = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
    ids, options = body.get("return_token_ids"), body.get("stream_options") or {}
    deltas = _tool_deltas(body) or [{"content": piece} for piece in _pieces(body)]
    chunks: list[Json] = []
    for index in range(body.get("n") or 1):
        for i, delta in enumerate([{"role": "assistant", "content": ""}, *deltas]):
            if delta == {} and not (ids or body.get("logprobs")):
                continue  # the parser holds text back
            choice: Json = {"index": index, "delta": delta, "logprobs": _logprobs(body, [f"t{i}"] if i else None)}
            choice |= {"finish_reason": None, "token_ids": [100 * index + i] if ids and i else None}
            chunks.append(top | {"choices": [choice]} | ({} if i else {"prompt_token_ids": PROMPT if ids else None}))
        choice["finish_reason"] = _finish(body)
    if not options.get("include_usage"):
        chunks[-1] |= {"system_fingerprint": "fp"}
        return [*map(sse, chunks), DONE]
    if options.get("continuous_usage_stats"):
        chunks = [chunk | {"usage": USAGE} for chunk in chunks]
    return [*map(sse, chunks), sse(top | {"choices": [], "usage": USAGE, "system_fingerprint": "fp"}), DONE]


COMPLETION = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "base"}


def completion(body: Json, pieces: list[str], finish: str | None = "length") -> Json:
    """The choice with this text."""
    asks, logprobs = body.get("return_token_ids"), None
    if body.get("logprobs") is not None:
        logprobs = {"tokens": pieces, "token_logprobs": [-0.25] * len(pieces), "text_offset": [0]}
    choice = {"index": 0, "text": "".join(pieces), "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
    ids = [TEXT.index(piece) for piece in pieces] if asks else None
    return choice | {"token_ids": ids, "prompt_token_ids": PROMPT if asks and "h" in pieces else None}


def completions(body: Json) -> Json:
    return COMPLETION | {"choices": [completion(body, TEXT)], "usage": USAGE}


def completions_stream(body: Json) -> list[bytes]:
    *begin, last = ([piece] for piece in TEXT)
    choices = [*(completion(body, piece, None) for piece in begin), completion(body, last)]
    chunks: list[Json] = [{"choices": [choice], "usage": None} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": USAGE})
    return [*(sse(COMPLETION | chunk) for chunk in chunks), DONE]


RESPONSE: Json = {
    "id": "resp_1", "created_at": 1, "model": "base", "object": "response", "status": "completed",
    "output": [{"id": "msg_1", "type": "message", "role": "assistant", "content": [{"text": "".join(TEXT)}]}],
}  # fmt: skip
MESSAGE: Json = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "base", "stop_reason": "end_turn",
    "content": [{"type": "text", "text": "".join(TEXT)}], "usage": {"input_tokens": 3, "output_tokens": 7},
}  # fmt: skip
# The proxy adds nothing to the last two.
ANSWERED: dict[str, Callable[[Json], Json]] = {
    "chat/completions": chat, "completions": completions, "responses": lambda _: RESPONSE, "messages": lambda _: MESSAGE
}  # fmt: skip
STREAMED: dict[str, Callable[[Json], list[bytes]]] = {
    "chat/completions": chat_stream,
    "completions": completions_stream,
    "responses": lambda body: [*stream(RESPONSES, RESPONSE, body)],
    "messages": lambda body: [*stream(MESSAGES, MESSAGE, body)],
}


def _pieces(body: Json) -> list[str]:
    return OBJECT if body.get("response_format") else TEXT


def _finish(body: Json) -> str:
    return "tool_calls" if body.get("tools") else "stop"


def _tools(body: Json) -> list[Json]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": tool["function"]["name"], "arguments": '{"a": 1}'}}
        for i, tool in enumerate(body.get("tools") or ())
    ]


def _tool_deltas(body: Json) -> list[Json]:
    """A name, arguments in two pieces, and in between nothing, while the parser holds text back."""
    deltas: list[Json] = []
    for i, call in enumerate(_tools(body)):
        deltas.append({"tool_calls": [call | {"index": i, "function": call["function"] | {"arguments": ""}}]})
        for piece in ('{"a"', ": 1}"):
            deltas += [{}, {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}]
    return deltas and [*deltas, {"content": ""}]


def _logprobs(body: Json, pieces: list[str] | None) -> Json | None:
    if pieces is None or not body.get("logprobs"):
        return None
    top = [{"token": "x", "logprob": -1e-05, "bytes": [120]}] * (body.get("top_logprobs") or 0)
    return {"content": [{"token": p, "logprob": -0.5, "bytes": list(p.encode()), "top_logprobs": top} for p in pieces]}


class Case(NamedTuple):
    """What is asked, and what is answered."""

    name: str
    request: bytes
    answer: Sequence[Step] | Script

    def script(self, asked: Asked) -> Sequence[Step]:
        return self.answer(asked) if callable(self.answer) else self.answer


def unnamed(request: bytes, answer: Sequence[Step] | Script) -> Case:
    """A case that says by itself what it is."""
    line, said = request.partition(b"\r\n")[0], answer.__name__ if callable(answer) else str(answer)
    return Case(f"{line!r} … {request[-80:]!r}: {said[:40]} … {said[-80:]}", request, answer)


def post(path: str = "chat/completions", body: Any = None, *headers: str, method: str = "POST") -> bytes:
    """A request, by default a chat with the content type and length that clients send."""
    data = body if isinstance(body, bytes) else json.dumps({"model": "m", **(body or {})}).encode()
    lines = [f"{method} /v1/{path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}", *headers]
    if not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} /v1/{path} HTTP/1.1", "Host: 127.0.0.1", *headers]).encode() + b"\r\n\r\n"


def head(status: int | str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Said", *headers]).encode("latin-1") + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, *headers: str, status: int = 200, kind: str = "application/json") -> bytes:
    """An answer with its length."""
    return head(status, f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers) + body


SSE_HEAD = head(200, "Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
CHUNKS = head(200, "Transfer-Encoding: chunked")
LAST = b"0\r\n\r\n"


def streamed(*pieces: bytes, last: bytes = LAST) -> list[Step]:
    """A stream, each piece a chunk of its own."""
    return [SSE_HEAD, *map(chunk, pieces), last]


def delta(text: str, **more: Any) -> Json:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}


CHAT = post(body={"messages": []})
STREAM = post(body={"messages": [], "stream": True})
ANSWER = dumps(chat({}))
HELLO = b"".join([*map(sse, (delta("hé😀"), delta("llo"))), DONE])
ERROR = b'{"error": {"message": "no", "type": "t", "param": null, "code": null}, "extra": 1}'

# vLLM's answers in the recorded APIs, asked for everything that changes them; and JSON that it would not write.

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SUB = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}]

ASKED: dict[str, list[Json]] = {
    "chat/completions": [
        {},
        {"logprobs": False, "return_token_ids": False},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 3},
        {"return_token_ids": True},
        {"return_token_ids": True, "logprobs": True},
        {"n": 2, "return_token_ids": True, "tools": [ADD, SUB]},
        {"tools": [ADD, SUB]},
        {"tools": [ADD, SUB], "parallel_tool_calls": True, "logprobs": True},
        {"response_format": {"type": "json_object"}, "logprobs": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
        {"unknown": {"nested": [1, 2.50, None, "é", "\ud83d\ude00"]}, "extra_body": {"x": 1e-7}},
        {"messages": PARTS},
        {"messages": [{"role": "user", "content": "Zoë 😀 \u2028 \\u0000 \x7f"}]},
    ],
    "completions": [
        {"prompt": "a"},
        {"prompt": "a", "logprobs": 2},
        {"prompt": "a", "logprobs": 0},
        {"prompt": "a", "return_token_ids": True},
        {"prompt": "a", "echo": True},
        {"prompt": [1, 2]},
        {"prompt": "a", "stream_options": {"include_usage": True}},
    ],
    "responses": [{"input": "a"}, {"input": "a", "background": True}],
    "messages": [{"messages": []}, {"messages": [], "tools": [{"name": "add"}], "system": "s"}],
}


def vllm(asked: Asked) -> list[Step]:
    """What vLLM answers to a request of any of the recorded APIs."""
    path, body = asked.target.decode().removeprefix("/v1/"), json.loads(asked.body)
    if body.get("stream"):
        return streamed(*STREAMED[path](body))
    return [whole(dumps(ANSWERED[path](body)), "x-request-id: 1")]


def dialects() -> Iterable[Case]:
    for path, bodies in ASKED.items():
        for more in ({}, {"stream": True}):
            yield from (unnamed(post(path, body | more), vllm) for body in bodies)


def pretty() -> Iterable[Case]:
    """An upstream other than vLLM: no byte of its JSON is written again."""
    text = b'{ "id" : "x",\r\n "choices": [ ], "n": 1.50, "big": 123456789012345678901234567890, "e": "\\u00e9\\/" }'
    odd = [b"[]", b"null", b'"text"', b"", b" ", b"\xff\xfe", b"<html>", b"1" * 4_000, b"{" + b" " * 99 + b"}"]
    for body in (text, *odd):
        yield unnamed(CHAT, [whole(body)])
        yield unnamed(STREAM, streamed(b"data: " + body + b"\n\n", DONE))
    wrong = {"stream": "yes", "messages": 3, "n": [], "temperature": "hot", "stream_options": 1}
    for said in ({"model": 5}, wrong, b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud800b"}]}'):
        yield unnamed(post(body=said), [whole(ERROR, status=400)])
    yield Case("a character in halves", STREAM, halves)


def halves(asked: Asked) -> list[Step]:
    """As servers send a character that they cut in two, which UTF-8 cannot hold."""
    ids = b'"token_ids":[%d],"logprobs":{"content":[{"token":"x","logprob":-1}]}'
    nothing = b'"token_ids":null,"logprobs":null'
    tokens = [ids % i if b'"return_token_ids"' in asked.body else nothing for i in range(2)]
    texts = (b'"a\\ud83d"', b'"\\ude00b"')
    said = [b'{"index":0,"delta":{"content":%s},%s}' % pair for pair in zip(texts, tokens, strict=True)]
    return streamed(*(b'data: {"choices":[%s]}\n\n' % choice for choice in said), DONE)


# Statuses, headers, encodings.


def statuses() -> Iterable[Case]:
    for status in (*range(400, 600), 200, 201, 202, 203, 206, 207, 226):
        yield unnamed(CHAT, [whole(ERROR if status > 299 else ANSWER, status=status)])
    for status in (400, 401, 404, 429, 500, 503, 529):
        yield unnamed(STREAM, [whole(ERROR, status=status)])
        yield unnamed(STREAM, [SSE_HEAD.replace(b"200", b"%d" % status), chunk(HELLO), LAST])
        yield unnamed(post("embeddings"), [whole(ERROR, status=status)])
    for status in (204, 205, 304):
        for request in (CHAT, post("embeddings"), get("files/x")):
            length = ["Content-Length: 0"] if status == 205 else []
            yield unnamed(request, [head(status, "X-Up: 1", *length)])
    yield Case("304 with the length of what is not sent", get("files/x"), [head(304, "ETag: x", "Content-Length: 5")])
    for status in (301, 302, 303, 307, 308):
        yield unnamed(CHAT, [whole(b"x", "Location: http://other/", status=status)])


HEADERS: dict[str, list[str]] = {
    "several cookies": ["Set-Cookie: a=1; Path=/", "Set-Cookie: b=2", "set-cookie: a=3"],
    "a header twice": ["X-A: 1", "X-A: 2", "x-a: 3"],
    "an empty header": ["X-Empty:", "X-Space: "],
    "Latin-1": ["X-Name: caf\xe9"],
    "server and date": ["Server: nginx/1.0", "Date: Wed, 21 Oct 2015 07:28:00 GMT", "Via: 1.1 x"],
    "what is for this connection": ["Connection: X-Hop, keep-alive", "X-Hop: 1", "Keep-Alive: timeout=5", "X-Stays: 1"],
    "a header of 30 KB": ["X-Big: " + "x" * 30_000],
    "500 headers": [f"X-{i}: {i}" for i in range(500)],
    "CORS": ["Access-Control-Allow-Origin: *", "Access-Control-Expose-Headers: *", "Vary: Origin"],
    "OpenAI's": ["openai-organization: o", "openai-processing-ms: 5", "x-request-id: req_1", "openai-version: 2020"],
}


JSON_HEAD, SSE = head(200, "Content-Type: application/json"), "Content-Type: text/event-stream"
FRAMED: list[Case] = [
    Case("JSON until the connection closes", CHAT, [JSON_HEAD, b"[]", Do.CLOSE]),
    Case("HTTP/1.0", CHAT, [whole(b"[]").replace(b"HTTP/1.1", b"HTTP/1.0"), Do.CLOSE]),
    Case("a stream with its length", STREAM, [whole(HELLO, kind="text/event-stream")]),
    Case("trailers", STREAM, [SSE_HEAD, chunk(HELLO), b"0\r\nX-Checksum: 1\r\n\r\n"]),
    Case("no content type", CHAT, [head(200, "Content-Length: 2") + b"[]"]),
    Case("a stream that says it is JSON", STREAM, [whole(HELLO)]),
    Case("the agent expects 100", post("chat/completions", None, "Expect: 100-continue"), [whole(ERROR, status=400)]),
]


def headers() -> Iterable[Case]:
    for name, lines in HEADERS.items():
        yield Case(f"{name}, recorded", CHAT, [whole(ERROR, *lines, status=400)])
        stream = SSE_HEAD[:-2] + "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        yield Case(f"{name}, streamed", STREAM, [stream, chunk(HELLO), LAST])
        if name not in ("what is for this connection", "Latin-1", "server and date"):
            yield Case(f"{name}, asked", post("chat/completions", None, *lines), [whole(ERROR, status=400)])
    yield from FRAMED
    for said in (b"100 Continue\r\n", b"103 Early Hints\r\nLink: </x>\r\n", b"102 Processing\r\n"):
        interim = b"HTTP/1.1 " + said + b"\r\n"
        yield unnamed(CHAT, [interim, whole(ERROR, status=400)])


PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress, "deflate": zlib.decompress, "br": brotli.decompress
}  # fmt: skip


def compressed() -> Iterable[Case]:
    """Recorded calls are asked for without an encoding; what comes compressed nevertheless arrives as what it says."""
    for name, pack in PACK.items():
        encoding = f"Content-Encoding: {name}"
        yield unnamed(CHAT, [whole(pack(ERROR), encoding)])
        begins = SSE_HEAD[:-2] + encoding.encode() + b"\r\n\r\n"
        yield unnamed(STREAM, [begins, chunk(pack(HELLO)), LAST])
        asks = post("embeddings", None, f"Accept-Encoding: {name}")
        yield unnamed(asks, [whole(pack(b"{}"), encoding)])
    packer = zlib.compressobj(wbits=31)
    pieces = [packer.compress(sse(delta(text))) + packer.flush(zlib.Z_SYNC_FLUSH) for text in "abc"]
    pieces.append(packer.compress(DONE) + packer.flush())
    begins = SSE_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n"
    steps = [step for piece in pieces for step in (chunk(piece), Do.UNTIL_SEEN)]
    yield Case("gzip stream unasked, in time", STREAM, [begins, *steps, LAST])
    yield Case("an unknown encoding", CHAT, [whole(b"\x00\xff", "Content-Encoding: own")])
    for accept in ("gzip, deflate, br", "*;q=0"):
        yield unnamed(post("chat/completions", None, f"Accept-Encoding: {accept}"), [whole(ERROR)])


# Routes that are not recorded, and methods, paths and bodies of all kinds.

FORM = (
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    + bytes(range(256))
    + b'\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--B--\r\n'
)


PASSED_ON = ["embeddings", "moderations", "images/generations", "rerank", "score", "messages/count_tokens", "tokenize"]
UPLOADS = ["files", "audio/transcriptions", "audio/translations", "images/edits", "uploads/u/parts", "batches"]
TARGETS = [
    "chat/completions", "chat/completions/c", "responses/resp_1", "responses/resp_1/input_items?limit=2",
    "files?a=1&b=%20+%2F%C3%A9&c", "files?x[]=1&x[]=2", "files?a=b?c=d/e:f@g", "files?after=%00", "files/a%20b",
    "files/%C3%A9", "files/a%2Bb", "files/a+b", "files/a;b=1", "models/org%2Fname", "files/x/",
]  # fmt: skip
CHUNKED = b"POST /v1/%s HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def echo(asked: Asked) -> list[Step]:
    return [whole(asked.method + b" " + asked.target + b"\n" + asked.body, kind="text/plain")]


def requests() -> Iterable[Case]:
    """Answered with what was asked."""
    for path in UPLOADS:
        yield unnamed(post(path, FORM, "Content-Type: multipart/form-data; boundary=B"), echo)
    for path in PASSED_ON:
        yield unnamed(post(path, {"input": ["é", [1, 2]], "unknown": 2.50}), echo)
    for method in ("PUT", "DELETE", "PATCH", "POST"):
        yield unnamed(post("files/x", b"\x00\xff{", method=method), echo)
        yield unnamed(get("files/x", "Content-Length: 0", method=method), echo)
    for method in ("GET", "DELETE", "OPTIONS"):
        yield unnamed(get("files/x", method=method), echo)
    for target in TARGETS:
        yield unnamed(get(target), echo)
    yield Case("chunked upload", CHUNKED % b"files" + chunk(b"a" * 99) + chunk(b"b") + LAST, echo)
    chat = CHUNKED % b"chat/completions" + chunk(b'{"model"') + chunk(b': "m"}') + LAST
    yield Case("chunked chat", chat, [whole(ERROR, status=400)])


def answers() -> Iterable[Case]:
    yield Case("HEAD", get("files/x", method="HEAD"), [head(200, "Content-Length: 5", "X-Up: 1")])
    asked = ("Origin: http://127.0.0.1", "Access-Control-Request-Method: POST")
    allowed = head(204, "Access-Control-Allow-Origin: *", "Allow: POST")
    yield Case("preflight", get("chat/completions", *asked, method="OPTIONS"), [allowed])
    large = whole(bytes(range(256)) * 12_000, kind="application/octet-stream")
    yield Case("a download of 3 MB", get("files/x/content"), [large])
    yield Case("events that are not recorded", get("threads/t/runs"), streamed(HELLO))


# Streams: cut anywhere, with anything in them, and in time.

SHORT = b"".join([sse(delta("é😀")), b": ping\n\n", DONE])
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
            yield Case(f"{name} cut at {at}", STREAM, streamed(text[:at], text[at:]))
        yield Case(f"{name} by byte", STREAM, streamed(*(text[i : i + 1] for i in range(len(text)))))


def tcp_splits() -> Iterable[Case]:
    """Every position of a whole raw answer, its head and its chunk sizes included, between two TCP segments."""
    stream = head(200, SSE, "Transfer-Encoding: chunked") + chunk(DONE) + LAST
    for name, request, raw in (("stream", STREAM, stream), ("JSON", CHAT, whole(b'{"choices":[]}'))):
        for at in range(1, len(raw)):
            yield Case(f"{name} cut at {at}", request, [raw[:at], raw[at:]])


EVENTS = {
    "event, id and retry": b"event: x\nid: 7\nretry: 10\n" + sse(delta("a")),
    "no space after the colon": b'data:{"choices":[]}\n\n',
    "data on several lines": b'data: {"choices":\ndata: []}\n\n',
    "a comment in an event": b": x\n" + sse(delta("a")),
    "comments alone": b": a\n\n:\n\n: b\n: c\n\n",
    "empty lines": b"\n\n\n\n" + sse(delta("a")) + b"\n\n",
    "an event without data": b"event: ping\n\n",
    "empty data": b"data:\n\ndata\n\ndata: \n\n",
    "a byte order mark": b"\xef\xbb\xbf" + sse(delta("a")),
    "text that is no JSON": b"data: hello\n\n",
    "JSON that is no object": b"data: 5\n\ndata: []\n\ndata: null\n\n",
    "text that is no UTF-8": b"data: \xff\xfe\n\n",
    "a NUL": b"data: \x00\n\n",
    "an error": b'data: {"error": {"message": "boom", "code": 500}}\n\n',
    "an error as an event": b'event: error\ndata: {"error": "boom"}\n\n',
    "an event of 1 MB": sse(delta("x" * 1_000_000)),
    "a thousand events": sse(delta("x")) * 1000,
    "unknown fields": sse(delta("a", unknown={"a": [1, None]}, obfuscation="xxx")),
}


def events() -> Iterable[Case]:
    for name, text in EVENTS.items():
        yield Case(name, STREAM, streamed(text, DONE))
        yield Case(f"{name}, CRLF", STREAM, streamed(text.replace(b"\n", b"\r\n"), DONE))
    for done in (b"data:[DONE]\n\n", b"data: [DONE] \r\n\r\n", b"event: done\ndata: [DONE]\n\n", b"data: [DONE]\n"):
        yield unnamed(STREAM, streamed(sse(delta("a")), done))
    yield Case("goes on after [DONE]", STREAM, streamed(HELLO, b": bye\n\n", sse(delta("more")), b"x"))
    finish = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    yield Case("whole and no [DONE]", STREAM, streamed(sse(delta("a")), sse(finish)))


def in_time() -> Iterable[Case]:
    """The next piece is sent when the agent has the one before: nothing is held back."""
    for name, text in EVENTS.items():
        steps = [step for piece in (text, sse(delta("b")), b": ping\n\n") for step in (chunk(piece), Do.UNTIL_SEEN)]
        yield Case(name, STREAM, [SSE_HEAD, *steps, chunk(DONE), Do.UNTIL_SEEN, LAST])
    raw = [CHUNKS, chunk(b"a"), Do.UNTIL_SEEN, chunk(b"b"), Do.UNTIL_SEEN, LAST]
    yield Case("a route that is not recorded", post("audio/speech"), raw)


# Upstreams that break off, stall, or answer garbage.

FIRST = [SSE_HEAD, chunk(sse(delta("a"))), Do.UNTIL_SEEN]
POINTS: list[tuple[str, bytes, list[Step]]] = [  # where an answer ends
    ("before the head", CHAT, []),
    ("in the head", CHAT, [head(200)[:-2], b"Content-Le"]),
    ("after the head", CHAT, [head(200, "Content-Length: 9")]),
    ("in the body", CHAT, [whole(ANSWER)[:-9]]),
    ("before the first event", STREAM, [SSE_HEAD]),
    ("in a chunk", STREAM, [*FIRST, chunk(sse(delta("a")))[:-20]]),
    ("before [DONE]", STREAM, [SSE_HEAD, chunk(HELLO[: -len(DONE)]), Do.UNTIL_SEEN]),
    ("in [DONE]", STREAM, [SSE_HEAD, chunk(HELLO[:-6]), Do.UNTIL_SEEN]),
    ("after [DONE], without the last chunk", STREAM, [SSE_HEAD, chunk(HELLO), Do.UNTIL_SEEN]),
    ("in a route that is not recorded", post("embeddings"), [CHUNKS, chunk(b"x" * 99), Do.UNTIL_SEEN]),
]


def broken() -> Iterable[Case]:
    for how in (Do.CLOSE, Do.RESET):
        yield from (Case(f"{how.name} {name}", request, [*steps, how]) for name, request, steps in POINTS)
    yield Case("a stream with its length, cut", STREAM, [whole(HELLO, kind="text/event-stream")[:-20], Do.CLOSE])
    yield Case("garbage in place of a head", CHAT, [b"SSH-2.0-x\r\n", Do.CLOSE])
    yield Case("garbage in place of a chunk's size, and silence", STREAM, [*FIRST, b"zz\r\n", Do.HANG])
    longer = b"3\r\n" + sse(delta("a")) + b"\r\n"
    yield Case("a chunk longer than its size", STREAM, [SSE_HEAD, longer, LAST, Do.HANG])


def broken_dialects() -> Iterable[Case]:
    """vLLM's streams, cut after each of their events, in all recorded APIs."""

    def cut(after: int) -> Script:
        def script(asked: Asked) -> list[Step]:
            path = asked.target.decode().removeprefix("/v1/")
            # Where it comes depends on what was asked for.
            frames = [f.replace(b',"system_fingerprint":"fp"', b"") for f in STREAMED[path](json.loads(asked.body))]
            return [SSE_HEAD, *map(chunk, frames[:after]), Do.CLOSE]

        return script

    for path in STREAMED:
        for after in range(len(STREAMED[path]({"stream": True}))):
            yield Case(f"{path} after {after} events", post(path, {"stream": True}), cut(after))


GENERATORS: list[Callable[[], Iterable[Case]]] = [
    dialects, pretty, splits, tcp_splits, events, in_time, statuses, headers, compressed, requests, answers, broken,
    broken_dialects,
]  # fmt: skip
FAMILIES: dict[str, list[Case]] = {family.__name__: [*family()] for family in GENERATORS}
