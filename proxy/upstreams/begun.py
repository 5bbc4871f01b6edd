"""Finds out from its first bytes whether an answer is a stream: some servers give streams another Content-Type."""

from __future__ import annotations

from collections.abc import AsyncIterator

from .base import Answer

# What may stand before the first line of a stream, and before JSON: a byte order mark, blanks.
_BEFORE = b"\xef\xbb\xbf \t\r\n"
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class BegunAnswer:
    """An answer whose first bytes were read, and which is what they say."""

    def __init__(self, answer: Answer, first: bytes, rest: AsyncIterator[bytes], *, is_stream: bool) -> None:
        self._first = first
        self._rest = rest
        self.is_stream = is_stream
        self.status = answer.status
        self.retry_after = answer.retry_after
        self.headers = answer.headers
        self.release = answer.release

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._first
        async for piece in self._rest:
            yield piece

    async def read(self) -> bytes:
        return b"".join([self._first, *[piece async for piece in self._rest]])


async def begun(answer: Answer, *, asked_to_stream: bool) -> Answer:
    """Return the answer when it is known whether it is a stream. Errors are those of `chunks`."""
    if answer.status != 200 or not (answer.is_stream or asked_to_stream):
        return answer
    rest, read, head = answer.chunks(), [], b""
    is_stream: bool | None = None
    async for piece in rest:
        read.append(piece)
        head = (head + piece[:64]).lstrip(_BEFORE) if head else piece.lstrip(_BEFORE)[:64]
        if (is_stream := _is_stream(head, answer.is_stream)) is not None:
            break
    return BegunAnswer(answer, b"".join(read), rest, is_stream=answer.is_stream if is_stream is None else is_stream)


def _is_stream(head: bytes, said: bool) -> bool | None:
    """Whether the answer that begins so is a stream, which its Content-Type `said` or not; None: not known yet."""
    if not head:
        return None
    if said:
        return not head.startswith((b"{", b"["))
    if head.startswith(_FIELDS):
        return True
    return None if any(field.startswith(head) for field in _FIELDS) else False
