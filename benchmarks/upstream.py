"""A model server that takes no time: canned answers of vLLM's shape from a bare asyncio protocol.

`python upstream.py PORT`. A body with `"stream":true` is answered with 40 chunks as fast as they go, several of which
arrive at a time; with `"paced":true` 1 ms apart, so that each travels alone. `"slow":true` keeps the stream open for
30 s after the first of them.
"""

import asyncio
import json
import sys
from typing import Any

import uvloop

CHUNKS = 40
PACE_S = 0.001
IDS, LOGPROB = 8, -0.5
COMPACT = (",", ":")  # as vLLM writes JSON


def _logprobs(n: int) -> dict:
    entry = {"token": "tok", "logprob": LOGPROB, "bytes": [116, 111, 107], "top_logprobs": []}
    return {"content": [entry] * n}


def _json(value: object) -> bytes:
    body = json.dumps(value, separators=COMPACT).encode()
    return f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _whole() -> bytes:
    choice = {
        "index": 0, "message": {"role": "assistant", "content": "tok" * IDS, "tool_calls": []},
        "logprobs": _logprobs(IDS), "finish_reason": "stop", "stop_reason": None, "token_ids": list(range(IDS)),
    }  # fmt: skip
    usage = {"prompt_tokens": 16, "completion_tokens": IDS, "total_tokens": 16 + IDS, "prompt_tokens_details": None}
    answer = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "base", "choices": [choice],
        "usage": usage, "prompt_token_ids": list(range(16)),
    }  # fmt: skip
    return _json(answer)


def _frames() -> list[bytes]:
    def frame(chunk: dict) -> bytes:
        data = b"data: " + json.dumps(chunk, separators=COMPACT).encode() + b"\n\n"
        return b"%x\r\n%s\r\n" % (len(data), data)

    top = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "base"}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    frames = [frame(top | {"choices": [first], "prompt_token_ids": list(range(16))})]
    for i in range(CHUNKS):
        choice = {
            "index": 0, "delta": {"content": "tok"}, "logprobs": _logprobs(1),
            "finish_reason": "stop" if i == CHUNKS - 1 else None, "token_ids": [i],
        }  # fmt: skip
        frames.append(frame(top | {"choices": [choice]}))
    usage = {"prompt_tokens": 16, "completion_tokens": CHUNKS, "total_tokens": 16 + CHUNKS}
    frames.append(frame(top | {"choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    return frames


WHOLE, FRAMES = _whole(), _frames()
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
OTHERS = {
    b"/v1/models": _json({"object": "list", "data": [{"id": "base", "object": "model", "parent": None, "root": "/"}]}),
    b"/weight_info": _json({"weight_version": "default"}),
    b"/is_paused": _json({"is_paused": False}),
    b"/health": _json({}),
}


class Upstream(asyncio.Protocol):
    """One connection; `needed`: bytes until the request that has begun is whole."""

    def __init__(self) -> None:
        self.buffer, self.needed = bytearray(), 0
        self.loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while len(self.buffer) >= self.needed and (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.buffer[:end]).lower()
            at = head.find(b"content-length:")
            self.needed = end + 4 + (int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0)
            if len(self.buffer) < self.needed:
                return
            # Where clients put it: behind the messages.
            options = bytes(self.buffer[max(end, self.needed - 600) : self.needed]).replace(b" ", b"")
            del self.buffer[: self.needed]
            self.needed = 0
            self.answer(head.split(b" ", 2)[1], options)

    def answer(self, path: bytes, options: bytes) -> None:
        if not path.endswith(b"/chat/completions"):
            self.transport.write(OTHERS.get(path, OTHERS[b"/v1/models"]))
        elif b'"stream":true' not in options:
            self.transport.write(WHOLE)
        elif b'"slow":true' in options:
            self.transport.write(STREAM_HEAD + FRAMES[0] + FRAMES[1])
            self.loop.call_later(30, self.send, b"".join(FRAMES[2:]))
        else:
            self.transport.write(STREAM_HEAD)
            self.stream(0, PACE_S if b'"paced":true' in options else 0.0)

    def stream(self, i: int, pace_s: float) -> None:
        """A write for each frame, as a model's server does it."""
        self.send(FRAMES[i])
        if i + 1 < len(FRAMES):
            self.loop.call_later(pace_s, self.stream, i + 1, pace_s)

    def send(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
