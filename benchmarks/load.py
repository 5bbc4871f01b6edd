"""Load on one URL for a while from a bare asyncio client: `python load.py '{"port": …, "connections": …, …}'`.

Prints one JSON object: answers, the failed ones, seconds, the client's own processor time, and the quantiles of latency
and of the time to the first byte in ms. An answer counts if it is whole: its length, or all its chunks and its end.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from statistics import quantiles
from typing import Any

import uvloop
from upstream import CHUNKS

PATIENCE_S = 30.0
MESSAGE_BYTES = 2_000
TEXT = 'The tool said:\n  {"rows": 3}\nSo the next step is to look at the other table, and then to answer.\n'
Request = tuple[bytes, bytes]  # head and body
Result = tuple[float, float]  # seconds to the last byte, and to the first of the body


class Client(asyncio.Protocol):
    """One connection that asks again as soon as the last answer is whole."""

    def __init__(self, requests: Iterator[Request], stream: bool) -> None:
        self.requests, self.stream = requests, stream
        self.results: list[Result] = []
        self.failed: list[str] = []
        self.until, self.waits = 0.0, False
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, until: float) -> None:
        self.until, self.waits = until, True
        self.buffer, self.first, self.body, self.length = bytearray(), 0.0, 0, -1
        self.began = time.perf_counter()
        head, body = next(self.requests)
        self.transport.write(head)  # both leave in one call
        self.transport.write(body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.buffer += data
        if not self.body and not self.read_head():
            return
        if not self.first and len(self.buffer) > self.body:
            self.first = now
        if self.is_whole():
            self.answered(now)

    def is_whole(self) -> bool:
        if self.length >= 0:
            return len(self.buffer) >= self.body + self.length
        return self.buffer.endswith(b"0\r\n\r\n")

    def read_head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.buffer[:end]).lower()
        at = head.find(b"\ncontent-length:")
        self.body, self.length = end + 4, int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
        return True

    def answered(self, now: float) -> None:
        self.waits = False
        if self.is_right():
            self.results.append((now - self.began, self.first - self.began))
        else:
            self.failed.append(self.buffer[:300].decode(errors="replace"))
        if now < self.until:
            self.ask(self.until)
        else:
            self.transport.close()

    def is_right(self) -> bool:
        if b" 200 " not in self.buffer[:16]:
            return False
        if not self.stream:
            return b'"finish_reason"' in self.buffer and self.buffer.rstrip(b"\r\n0").endswith(b"}")
        return b"data: [DONE]" in self.buffer and (self.events() >= CHUNKS)

    def events(self) -> int:
        """Of a stream. Where a chunk of HTTP begins within an event's first bytes, the framing is taken off first."""
        found = self.buffer.count(b"data: {")
        if found >= CHUNKS:
            return found
        left, body = bytes(self.buffer[self.body :]), b""
        while left:
            size, _, left = left.partition(b"\r\n")
            body, left = body + left[: int(size, 16)], left[int(size, 16) + 2 :]
        return body.count(b"data: {")

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            if self.waits:
                self.failed.append(f"connection lost: {error}")
            self.done.set_result(None)


def conversation(size: int) -> list[dict[str, str]]:
    """As agents send them: many messages of up to 2 kB, with quotes and line breaks; `size` bytes in all."""
    lengths = [MESSAGE_BYTES] * (size // MESSAGE_BYTES) + [size % MESSAGE_BYTES] * bool(size % MESSAGE_BYTES)
    text = TEXT * (MESSAGE_BYTES // len(TEXT) + 1)
    return [{"role": ("user", "assistant")[i % 2], "content": text[:n]} for i, n in enumerate(lengths)]


def bodies_of(prompt: int, options: dict[str, bool], turns: int) -> list[bytes]:
    """The requests of an agent's turns, of `prompt` bytes on average: each repeats the last and adds two messages."""
    sizes = [prompt + (2 * turn - turns + 1) * MESSAGE_BYTES for turn in range(turns)]
    return [
        json.dumps({"model": "base", "messages": conversation(size), **options}, separators=(",", ":")).encode()
        for size in sizes
    ]


def requests_of(path: str, numbers: Iterator[int], key: str, bodies: list[bytes]) -> Iterator[Request]:
    """Heads and bodies: for each of the numbers, which stands for `{}` in the path, all bodies in their order."""
    rest = (
        f" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
        "content-length: "
    )
    for number in numbers:
        for body in bodies:
            yield f"POST {path.replace('{}', str(number))}{rest}{len(body)}\r\n\r\n".encode(), body


async def main(
    port: int,
    connections: int,
    seconds: float,
    prompt: int,
    options: dict[str, bool],
    path: str = "/v1/chat/completions",
    ids: int | None = None,
    key: str = "sk-bench",
    turns: int = 1,
) -> None:
    """`options`: what else a body says, such as `stream`; `prompt`, `turns`: see `bodies_of`.

    `{}` in the path is a number, counted up, or around the first `ids` of them; it stays for all turns of a connection.
    """
    numbers, bodies = cycle(range(ids)) if ids else count(), bodies_of(prompt, options, turns)
    loop = asyncio.get_running_loop()
    make: Callable[[], Client] = lambda: Client(  # noqa: E731
        requests_of(path, numbers, key, bodies), bool(options.get("stream"))
    )
    clients = [(await loop.create_connection(make, "127.0.0.1", port))[1] for _ in range(connections)]
    began, cpu = time.perf_counter(), time.process_time()
    for client in clients:
        client.ask(began + seconds)
    _, waiting = await asyncio.wait([client.done for client in clients], timeout=seconds + PATIENCE_S)
    took = time.perf_counter() - began
    results = [result for client in clients for result in client.results]
    failed = [text for client in clients for text in client.failed] + [f"no answer in {PATIENCE_S} s"] * len(waiting)
    latency, first = ([1000 * r[i] for r in results] for i in (0, 1))
    print(
        json.dumps(
            {
                "answers": len(results),
                "failed": len(failed),
                "example": failed[:1],
                "seconds": took,
                "client_cpu_s": time.process_time() - cpu,
                "latency_ms": quantiles(latency, n=100)[49::49] if len(latency) > 1 else latency,
                "first_ms": quantiles(first, n=100)[49::49] if len(first) > 1 else first,
            }
        )
    )


if __name__ == "__main__":
    uvloop.run(main(**json.loads(sys.argv[1])))
