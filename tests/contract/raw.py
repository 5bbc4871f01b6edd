"""Raw connections to a proxy, an upstream that tells what reached it, and one that answers with any bytes."""

from __future__ import annotations

import asyncio
import re
import socket
import socketserver
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from aiohttp import web

Connection = socket.socket
Answer = Callable[[Connection, bytes], bool | None]  # of a request; True: the connection stays open

try:
    zstd: Any = import_module("compression.zstd")
except ImportError:
    zstd = import_module("backports.zstd")

STATUS_LINE = b"HTTP/1.1 "
HOST = b"Host: 127.0.0.1\r\n"


@dataclass
class Wire:
    """An answer as it goes over the wire: each piece in a packet of its own."""

    pieces: list[bytes]
    content_type: str | None = "text/event-stream"
    status: int = 200
    breaks: bool = False  # after the last piece
    gate: threading.Event | None = None  # what the last piece waits for
    was_held: bool = field(default=False, init=False)  # it waited in vain
    headers: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0  # after each piece


async def write(request: web.Request, wire: Wire) -> web.StreamResponse:
    answer = web.StreamResponse(status=wire.status, headers=wire.headers)
    if wire.content_type is not None:
        answer.headers.setdefault("Content-Type", wire.content_type)
    await answer.prepare(request)
    for place, piece in enumerate(wire.pieces, 1):
        if place == len(wire.pieces) and wire.gate is not None:
            wire.was_held = not await asyncio.to_thread(wire.gate.wait, 20)
        await answer.write(piece)
        await asyncio.sleep(wire.pause_s)
    if wire.breaks:
        assert request.transport is not None
        request.transport.abort()
    return answer


class Seen(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]  # with lower-case names
    body: bytes


class Upstream:
    """Keeps what reached it, and answers as the test says."""

    def __init__(self) -> None:
        self.app = web.Application(client_max_size=2**26)
        self.app.router.add_route("*", "/{path:.*}", self._answer)
        self.reset()

    def reset(self) -> None:
        """Forget what reached it, and answer `{}`."""
        self.seen: list[Seen] = []
        self.status, self.headers, self.pieces = 200, dict[str, str](), [b"{}"]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.method, request.raw_path, headers, await request.read()))
        wire = Wire(self.pieces, "application/json", self.status, headers=self.headers, pause_s=0.001)
        return await write(request, wire)


class RawServer(socketserver.ThreadingTCPServer):
    """Reads requests and leaves the bytes of the answer to `answer`."""

    daemon_threads = True
    answer: Answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.asked: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):
            while asked := _read_request(request):
                self.asked.append(asked)
                if not self.answer(request, asked):
                    return


def _read_request(one: Connection) -> bytes:
    data, missing = b"", 1
    while missing > 0:
        if not (piece := one.recv(2**20)):
            return b""
        data += piece
        head, ended, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        missing = int(length[1]) - len(body) if length and ended else not ended
    return data


@contextmanager
def serving_raw(answer: Answer = lambda *_: None) -> Iterator[RawServer]:
    with RawServer() as server:
        server.answer = answer  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sends(*pieces: bytes) -> Answer:
    return lambda one, _: one.sendall(b"".join(pieces))


def connect(url: str, receive_buffer: int = 2**16) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    one.settimeout(20)
    host, port = url.removeprefix("http://").split(":")
    one.connect((host, int(port)))
    return one


def send(url: str, *pieces: bytes, answers: int = 1) -> list[bytes]:
    """The answers over one connection: as many as are to be expected, and those beyond them."""
    out = b""
    with connect(url) as one, suppress(TimeoutError, ConnectionError):
        for piece in pieces:
            one.sendall(piece)
        while piece := one.recv(2**16):
            out += piece
            one.settimeout(0.1 if out.count(STATUS_LINE) >= answers else 20)
    return [STATUS_LINE + part for part in out.split(STATUS_LINE)[1:]]


def statuses(answers: list[bytes]) -> list[int]:
    return [int(answer.split(b" ")[1]) for answer in answers]


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()
