"""A streamed answer as it passes: what goes to the agent now, and what the record will say."""

from __future__ import annotations

from typing import Any

import orjson

from lightning_proxy.proxy.assemble import Assembler
from lightning_proxy.proxy.capture import Tokens
from lightning_proxy.proxy.inject import Injection, StreamCleaner
from lightning_proxy.proxy.sse import Frame, SSEDecoder


class Transcript:
    """Turns the upstream's bytes into the agent's, up to `done`: the terminal event, which waits for the record."""

    def __init__(self, injection: Injection) -> None:
        self.tokens = Tokens()
        self.error: str | None = None
        self.done: bytes | None = None
        self._decoder = SSEDecoder()
        self._injection = injection
        self._cleaner = StreamCleaner(injection)
        self._assembler = Assembler()

    def feed(self, data: bytes) -> bytes:
        """The bytes to send now; from the terminal event on they are kept back in `done`. Not to be fed after that."""
        out = b""
        for frame in self._decoder.feed(data):
            if self.done is not None:
                self.done += frame.raw
            elif frame.is_done:
                out += self._cleaner.flush()
                self.done = frame.raw
            else:
                out += self._pass(frame)
        if self.done is not None:
            self.done += self._decoder.rest
        return out

    def end(self) -> bytes:
        """The bytes still held when the stream is over. Sets `done` for a terminal event without its blank line."""
        last = self._decoder.close()
        if last.is_done:
            self.done = last.raw
        # An unfinished frame means nothing to an SSE client, and may hold what was injected.
        return self._cleaner.flush() + (b"" if self._injection or last.is_done else last.raw)

    def response(self) -> Any:
        """The assembled answer so far, as the agent sees it; None before its first chunk."""
        return self._assembler.result()

    def _pass(self, frame: Frame) -> bytes:
        if frame.data is None:
            return frame.raw
        chunk = _parse(frame.data)
        if not isinstance(chunk, dict):
            self.error = self.error or f"the upstream sent an event that is no JSON object: {frame.data[:200]!r}"
            return self._cleaner.flush() + frame.raw
        if chunk.get("error"):
            self.error = self.error or _message(chunk["error"])
            self._assembler.feed(chunk)
            return self._cleaner.flush() + frame.raw
        self.tokens.add(chunk)
        out = self._cleaner.clean(frame.raw, chunk)
        self._assembler.feed(chunk)
        return out


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return f"the upstream sent an error: {message}"[:1000]
