"""The floors: a raw ASGI app on aiohttp's client that forwards and records nothing. `python forwarder.py PORT URL`.

With a third argument, a new SQLite file, it commits each request before it is sent on, and each answer before its last
byte: the least that a proxy with a durable record does. It parses nothing, asks for nothing, and has no rollouts.
"""

import asyncio
import sqlite3
import sys
from typing import Any

import aiohttp
import uvicorn


class Journal:
    """Rows that are committed together, by the thread that waits for them: all that came in one turn of its loop."""

    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = NORMAL")
        self.db.execute("CREATE TABLE bodies (id INTEGER PRIMARY KEY, body BLOB)")
        self.waiting: list[tuple[bytes, asyncio.Future[None]]] = []

    def commit(self, body: bytes) -> asyncio.Future[None]:
        """Done when the row is durable."""
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self.flush)
        done = loop.create_future()
        self.waiting.append((body, done))
        return done

    def flush(self) -> None:
        group, self.waiting = self.waiting, []
        self.db.execute("BEGIN")
        self.db.executemany("INSERT INTO bodies (body) VALUES (?)", [(body,) for body, _ in group])
        self.db.execute("COMMIT")
        for _, done in group:
            if not done.cancelled():
                done.set_result(None)


class Forwarder:
    def __init__(self, url: str, journal: Journal | None = None) -> None:
        self.url = url
        self.journal = journal
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.session is None:
            self.session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if self.journal is not None:
            await self.journal.commit(body)
        headers = {k.decode(): v.decode() for k, v in scope["headers"] if k not in (b"host", b"content-length")}
        async with self.session.request(
            scope["method"], self.url + scope["path"], data=body, headers=headers
        ) as answer:
            kept = [(k.lower(), v) for k, v in answer.raw_headers if k.lower() != b"transfer-encoding"]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            await (self.pass_on if self.journal is None else self.keep)(answer, send)

    async def pass_on(self, answer: aiohttp.ClientResponse, send: Any) -> None:
        async for data in answer.content.iter_any():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def keep(self, answer: aiohttp.ClientResponse, send: Any) -> None:
        """Pass on what came as soon as more has come, and the last of it when all is durable."""
        assert self.journal is not None
        parts: list[bytes] = []
        async for data in answer.content.iter_any():
            if parts:
                await send({"type": "http.response.body", "body": parts[-1], "more_body": True})
            parts.append(data)
        await self.journal.commit(b"".join(parts))
        await send({"type": "http.response.body", "body": parts[-1] if parts else b""})


if __name__ == "__main__":
    port, url, *journals = sys.argv[1:]
    uvicorn.run(
        Forwarder(url, *map(Journal, journals)), host="127.0.0.1", port=int(port), log_level="warning",
        access_log=False, lifespan="off", server_header=False, date_header=False, backlog=2048,
    )  # fmt: skip
