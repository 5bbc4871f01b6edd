"""Load on one URL for a while from a bare asyncio client: `python load.py '{"port": …, "connections": …, …}'`.

Prints one JSON object: answers, errors, seconds, and the quantiles of latency and of the time to the first byte in ms.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from statistics import quantiles


class Client(asyncio.Protocol):
    """One connection that asks again as soon as the last answer is whole."""

    def __init__(
        self, requests: Iterator[bytes], results: list[tuple[float, float]], until: float, failed: list[str]
    ) -> None:
        self.requests, self.results, self.until, self.failed = requests, results, until, failed
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.buffer, self.first, self.need = b"", 0.0, -1
        self.began = time.perf_counter()
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.buffer += data
        if self.need < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            if b" 200 " not in head[:16]:
                self.failed.append(self.buffer[:200].decode(errors="replace"))
            at = head.find(b"content-length:")
            self.need = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not self.first and (self.need or len(self.buffer) > self.buffer.find(b"\r\n\r\n") + 4):
            self.first = now
        whole = len(self.buffer) >= self.need if self.need else self.buffer.endswith(b"0\r\n\r\n")
        if whole:
            self.results.append((now - self.began, self.first - self.began))
            if now < self.until:
                self.ask()
            else:
                self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.buffer and self.need != 0 and len(self.buffer) < self.need:
            self.failed.append(f"connection lost: {error}")
        if not self.done.done():
            self.done.set_result(None)


async def main(port: int, connections: int, seconds: float, prompt_bytes: int, stream: bool, path: str) -> None:
    fields = {"model": "base", "messages": [{"role": "user", "content": "x" * prompt_bytes}], "stream": stream}
    body = json.dumps(fields, separators=(",", ":")).encode()
    rest = f" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    tail = rest.encode() + b"authorization: Bearer sk-bench\r\n\r\n" + body
    # Every call in a rollout of its own: nothing of it is stored already.
    requests = (b"POST " + path.replace("{}", str(i)).encode() + tail for i in count())
    results: list[tuple[float, float]] = []
    failed: list[str] = []
    began = time.perf_counter()
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda: Client(requests, results, began + seconds, failed), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.wait([client.done for client in made], timeout=seconds + 30)
    took = time.perf_counter() - began
    latency, first = ([1000 * r[i] for r in results] for i in (0, 1))
    print(
        json.dumps(
            {
                "answers": len(results),
                "failed": len(failed),
                "example": failed[:1],
                "seconds": took,
                "latency_ms": quantiles(latency, n=100)[49::49] if len(latency) > 1 else latency,
                "first_ms": quantiles(first, n=100)[49::49] if len(first) > 1 else first,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
