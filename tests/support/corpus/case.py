"""What a case is made of: the bytes of a request, and what an upstream says to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from support import voice
from support.played import Script, Step


@dataclass(frozen=True)
class Case:
    """What is asked, and what is answered."""

    name: str
    request: bytes
    script: Script


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


def says(*steps: Step) -> Script:
    return lambda asked: steps


def whole(body: bytes, *headers: str, status: int = 200, kind: str = "application/json") -> bytes:
    """An answer with its length."""
    return head(status, f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers) + body


SSE_HEAD = head(200, "Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def streamed(*pieces: bytes, last: bytes = LAST) -> list[Step]:
    """A stream, each piece a chunk of its own."""
    return [SSE_HEAD, *map(chunk, pieces), last]


def delta(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}


CHAT = post(body={"messages": []})
STREAM = post(body={"messages": [], "stream": True})
ANSWER = voice.dumps(voice.chat({}))
HELLO = b"".join([*map(voice.sse, (delta("hé😀"), delta("llo"))), DONE])
ERROR = b'{"error": {"message": "no", "type": "t", "param": null, "code": null}, "extra": 1}'
