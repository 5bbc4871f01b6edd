"""A played upstream and an agent that see and send every byte themselves: no framework, no HTTP client in between."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import h11

Headers = list[tuple[bytes, bytes]]


class Do(Enum):
    """What the upstream does between two pieces of bytes."""

    CLOSE = auto()
    RESET = auto()  # RST in place of FIN
    HANG = auto()  # nothing more, until the other side leaves
    UNTIL_SEEN = auto()  # wait until the agent has another piece of the body


Step = bytes | Do


@dataclass(frozen=True)
class Asked:
    """A request as the upstream saw it."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes


Script = Callable[[Asked], Sequence[Step]]


@dataclass
class Got:
    """An answer as the agent saw it. `complete`: it ended as HTTP says that an answer ends; `waits`: it did not end."""

    status: int | None = None
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    complete: bool = False
    waits: bool = False


class Played:
    """An upstream that answers each request by `script`, and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: Script = lambda asked: []
        self.asked: list[Asked] = []
        self.seen = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while asked := await _read_request(reader):
                self.asked.append(asked)
                if not await self._answer(reader, writer, self.script(asked)):
                    break
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: Sequence[Step]) -> bool:
        """Whether the connection stays open for another request."""
        for step in steps:
            if isinstance(step, bytes):
                self.seen.clear()
                writer.write(step)
                await writer.drain()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            elif step is Do.UNTIL_SEEN:
                await asyncio.wait_for(self.seen.wait(), 5)
            elif step is Do.HANG:
                await reader.read()
                return False
            else:
                if step is Do.RESET:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return False
        return True


@asynccontextmanager
async def playing(played: Played) -> AsyncIterator[str]:
    """Serve; yields the root URL."""
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0, limit=2**20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def ask(url: str, request: bytes, seen: asyncio.Event) -> Got:
    """Send these bytes and read one answer, strictly. An answer that does not come or breaks off is not complete."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    got = Got()
    try:
        async with asyncio.timeout(10):
            await _read_answer(reader, request.split(b" ", 1)[0], got, seen)
    except TimeoutError:
        got.waits = True
    except (ConnectionError, h11.RemoteProtocolError):
        pass
    writer.close()
    return got


async def _read_answer(reader: asyncio.StreamReader, method: bytes, got: Got, seen: asyncio.Event) -> None:
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**22)
    parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    while not got.complete:
        event = await _next_event(parser, reader)
        if isinstance(event, h11.Response):
            got.status, got.headers = event.status_code, [(bytes(n), bytes(v)) for n, v in event.headers]
        elif isinstance(event, h11.Data):
            got.body += event.data
            seen.set()
        elif isinstance(event, h11.EndOfMessage):
            got.complete = True
        elif not isinstance(event, h11.InformationalResponse):
            return


async def _next_event(parser: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := parser.next_event()) is h11.NEED_DATA:
        parser.receive_data(await reader.read(65536))
    return event


async def _read_request(reader: asyncio.StreamReader) -> Asked | None:
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=2**22)
    head: Any = None
    body = b""
    while True:
        event = await _next_event(parser, reader)
        if isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return Asked(bytes(head.method), bytes(head.target), [(bytes(n), bytes(v)) for n, v in head.headers], body)
        else:
            return None
