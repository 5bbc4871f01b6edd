"""The floor: a raw ASGI app on aiohttp's client that forwards and records nothing. `python forwarder.py PORT URL`."""

import sys
from typing import Any

import aiohttp
import uvicorn


class Forwarder:
    def __init__(self, url: str) -> None:
        self.url = url
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
        headers = {k.decode(): v.decode() for k, v in scope["headers"] if k not in (b"host", b"content-length")}
        async with self.session.request(
            scope["method"], self.url + scope["path"], data=body, headers=headers
        ) as answer:
            kept = [(k.lower(), v) for k, v in answer.raw_headers if k.lower() != b"transfer-encoding"]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(
        Forwarder(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False,
        lifespan="off", server_header=False, date_header=False, backlog=2048,
    )  # fmt: skip
