"""Server-sent events as bytes: frames are found, never rewritten. https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import NamedTuple

DONE = b"[DONE]"

# Atomic groups: the two bytes of a CRLF never count as two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
# This many bytes at the end may be the beginning of a blank line.
_BLANK = 3
# A frame larger than this is not searched again from its start with each new piece.
_LARGE = 64 * 1024
_LINE_END = re.compile(rb"\r\n|\r|\n")
_EVENT = re.compile(rb"(?:^|[\r\n])event: ?([^\r\n]*)")


class Frame(NamedTuple):
    """One event. `raw` is every byte of it, its blank line included; `data` is None for an event without data."""

    raw: bytes
    data: bytes | None

    @property
    def is_done(self) -> bool:
        return self.data is not None and self.data.strip() == DONE


class SSEDecoder:
    """Cuts a byte stream into frames. No byte is lost: all that it returned, followed by `rest`, is the input."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._let_go = False  # the beginning of the frame that has not ended was given out
        self._begins = True  # no frame has ended: a byte order mark may come before the first

    @property
    def rest(self) -> bytes:
        """Return the bytes of a frame that has not ended yet."""
        return bytes(self._buffer)

    @property
    def pending(self) -> int:
        """Return the number of bytes in `rest`."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        frames = self._cut(data)
        if frames and (self._begins or self._let_go):
            frames[0] = self._last_of(frames[0].raw)
            self._begins = self._let_go = False
        return frames

    def let_go(self) -> bytes:
        """Remove and return all but the last 3 bytes of an unfinished frame, which then counts as one without data."""
        self._let_go = True
        given = bytes(self._buffer[:-_BLANK])
        del self._buffer[:-_BLANK]
        return given

    def _cut(self, data: bytes) -> list[Frame]:
        if len(self._buffer) < _LARGE and b"\r" not in (text := bytes(self._buffer) + data):
            *complete, rest = text.split(b"\n\n")
            self._buffer = bytearray(rest)
            return [
                # One line of data, as most frames are.
                Frame(raw + b"\n\n", raw[6:])
                if raw.startswith(b"data: ") and b"\n" not in raw
                else _frame(raw + b"\n\n")
                for raw in complete
            ]
        search_from = max(0, len(self._buffer) - _BLANK)
        buffer = self._buffer
        buffer += data
        frames = []
        start = 0
        while match := _BLANK_LINE.search(buffer, max(start, search_from)):
            frames.append(_frame(bytes(buffer[start : match.end()])))
            start = match.end()
        del buffer[:start]
        return frames

    def close(self) -> Frame:
        """Return the frame that the end of the stream cut off, empty if there is none, and clear the buffer."""
        last = self._last_of(bytes(self._buffer))
        self._buffer.clear()
        return last

    def _last_of(self, raw: bytes) -> Frame:
        """Return `raw` as a frame, but without data if `let_go` has returned the beginning of that frame."""
        text = raw.removeprefix(BOM_UTF8) if self._begins else raw
        return Frame(raw, None if self._let_go else _frame(text).data)


def encode(data: bytes) -> bytes:
    """Return the bytes of one event with one line of data."""
    return b"data: " + data + b"\n\n"


def event_name(raw: bytes) -> str:
    """Return the `event` field of a frame; empty if it has none."""
    match = _EVENT.search(raw)
    return match[1].decode(errors="replace") if match else ""


def _frame(raw: bytes) -> Frame:
    lines = (line.partition(b":") for line in _LINE_END.split(raw) if line.startswith(b"data"))
    values = [value.removeprefix(b" ") for name, _, value in lines if name == b"data"]
    return Frame(raw, b"\n".join(values) if values else None)
