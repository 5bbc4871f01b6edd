"""Follows an answer as it passes: decides the bytes to send to the agent now and the content of the record."""

from __future__ import annotations

from typing import Any

from ...core.errors import UpstreamUnreachable
from ...core.json_text import as_utf8, encode_as_vllm, loads, loads_in_turns
from ...core.sse import Frame, SSEDecoder
from ...core.tokens import Tokens
from ...core.values import message_of_error, named_error
from .chat import Injection
from .dialects import Dialect, Stream

Json = dict[str, Any]

# The record of a larger answer has nothing of it.
MAX_ANSWER_BYTES = 2**26
# From so many bytes on, an answer that is no stream is read in a thread, though that takes several times as long.
LARGE_ANSWER = 2**20
TOO_LARGE = "the answer is larger than 64 MB: the agent got it, and it was not kept"
# An event that may hold injected fields is held until it ends; no real one is as large as this.
MAX_HELD_BYTES = 2**30
_BLANKS = b" \t\r\n"


class Transcript:
    """A streamed answer: turns the upstream's bytes into the agent's bytes and the record.

    Its last event, and all after it, is `held`: it waits for the record.
    Where the stream is rewritten, a frame that never ended is kept from the agent: it may hold what was injected.
    """

    def __init__(self, stream: Stream) -> None:
        self.ended = False
        self.held = b""
        self._garbage: str | None = None
        self.size = 0
        self._let_go = False  # an event was too large to look at
        self._decoder = SSEDecoder()
        self._stream = stream
        self._rewrites = stream.rewrites

    @property
    def tokens(self) -> Tokens:
        return Tokens() if self.unkept else self._stream.tokens

    @property
    def unkept(self) -> str | None:
        """Return why the record has nothing of the answer, or None if it has."""
        return TOO_LARGE if self.size > MAX_ANSWER_BYTES else None

    @property
    def may_end(self) -> bool:
        """Return whether the stream may end here: after its last event or an error, or without for some servers.

        An event that was too large to look at may have been the last one.
        """
        return self.ended or self._stream.error is not None or self._stream.complete or self._let_go

    @property
    def error(self) -> str | None:
        return self._garbage or self._stream.error

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send now. The last event and all after it stay in `held`; do not feed after that.

        Raises UpstreamUnreachable for an event that is longer than any that can be meant.
        """
        self.size += len(data)
        out, usual = b"", self._stream.usual
        while data and not self.ended and usual is not None and usual.expected:
            if not self._decoder.pending:
                passed, data = usual.pass_on(data)
                out += passed
            if data:
                one, blank, data = data.partition(b"\n\n")
                out += self._parse(one + blank)
        return out + self._parse(data) if data else out

    def _parse(self, data: bytes) -> bytes:
        """Return the bytes to send of events that may be unusual."""
        out = b""
        for frame in self._decoder.feed(data):
            if self.ended:
                self.held += frame.raw
            elif frame.is_done:
                out += self._stream.flush()
                self._end_with(self._stream.last(frame.raw))
            else:
                sent = self._pass(frame)
                if self._stream.finished:
                    self._end_with(sent)
                else:
                    out += sent
        if self.ended:
            self.held += self._decoder.rest
        elif self._decoder.pending > MAX_ANSWER_BYTES and not self._rewrites:
            self._let_go = True
            out += self._stream.flush() + self._decoder.let_go()
        elif self._decoder.pending > MAX_HELD_BYTES:
            raise UpstreamUnreachable(f"the upstream sent {self._decoder.pending} bytes without the end of an event")
        return out

    def end(self) -> bytes:
        """Return the bytes to send at the stream's end. Its last event is `held` if only its blank line was missing."""
        last = self._decoder.close()
        out = self._stream.flush() + (b"" if self._rewrites or last.is_done else last.raw)
        if last.is_done or self._stream.complete:
            held = self._stream.last(last.raw if last.is_done else b"")
            self.ended, self.held = bool(held), held
        return out

    def _end_with(self, last: bytes) -> None:
        self.ended, self.held = True, last

    def response(self) -> Any:
        """Return the assembled answer so far, as the agent sees it; None before its first event, or if not kept."""
        return None if self.unkept else self._stream.response()

    def _pass(self, frame: Frame) -> bytes:
        if frame.data is None or not frame.data.strip():  # an event without data is none, as SSE has it
            return frame.raw
        event = _parse(frame.data)
        if isinstance(event, dict):
            return self._stream.feed(frame.raw, event)
        self._garbage = self._garbage or f"the upstream sent an event that is no JSON object: {frame.data[:200]!r}"
        return self._stream.flush() + frame.raw


class BufferedTranscript:
    """An answer that is no stream. Its last byte that is no blank waits for the record, like a stream's last event.

    `rewrites`: the agent gets other bytes than the upstream sent, which are known at the end. Until then only blanks
    may be sent, by which some servers keep the connection alive.
    """

    may_end = True

    def __init__(self, dialect: Dialect, injection: Injection, status: int, *, translated: bool) -> None:
        self.shown = False
        self.ended = False
        self.held = b""
        self.error: str | None = None
        self.tokens = Tokens()
        self.unkept: str | None = None
        self._succeeded = status // 100 == 2
        self.rewrites = translated or (self._succeeded and bool(injection))
        self._dialect = dialect
        self._injection = injection
        self._status = status
        self._pieces: list[bytes] = []
        self.size = 0
        self._seen = self._sent = 0  # pieces that were looked at; bytes that were sent
        self._waits = b""  # of the pieces that were looked at
        self._body: Any = None

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send now: none until the answer is `shown` as it comes."""
        self._pieces.append(data)
        self.size += len(data)
        if not self.shown or (self.rewrites and self._waits):
            return b""
        data = self._waits + b"".join(self._pieces[self._seen :])
        text = len(data.rstrip(_BLANKS))
        end = len(data) - len(data.lstrip(_BLANKS)) if self.rewrites or not text else text - 1
        self._seen, self._sent, self._waits = len(self._pieces), self._sent + end, data[end:]
        return data[:end]

    def end(self) -> bytes:
        """Read the answer, which is there now; in a thread if it is large (`LARGE_ANSWER`).

        Return nothing to send: the rest of it is `held`.
        """
        data, self._pieces = b"".join(self._pieces), []
        self.unkept = TOO_LARGE if len(data) > MAX_ANSWER_BYTES else None
        if not self._succeeded:
            self.error = f"the upstream answered {self._status}"
        self.ended, self.held = True, data[self._sent :]
        if self.unkept and not (self._succeeded and self._injection):  # nothing to read in it, or to take out of it
            return b""
        try:
            data = as_utf8(data)
            body = loads(data) if len(data) < LARGE_ANSWER else loads_in_turns(data)
        except ValueError:
            body = data.decode(errors="replace") or None
        if isinstance(body, dict):
            body, rewritten = self._read(body) if self._succeeded else self._refused(body)
            self.held = self.held if rewritten is None else rewritten
        elif self._succeeded:
            self.error = "the upstream's answer is no JSON object"
        self._body = None if self.unkept else body
        return b""

    def _read(self, body: Json) -> tuple[Json, bytes | None]:
        """Read the tokens, and return the agent's answer, without what was injected; None: the upstream's bytes."""
        if (error := named_error(body)) is not None:
            self.error = message_of_error(error)
        if not self.unkept:
            self.tokens = self._dialect.tokens(body)
        agents = self._dialect.agents(body, self._injection)
        return (body, None) if agents is None else (agents, encode_as_vllm(agents))

    def _refused(self, body: Json) -> tuple[Json, bytes | None]:
        refusal = self._dialect.refusal(body, self._status)
        return (body, None) if refusal is None else (refusal, encode_as_vllm(refusal))

    def response(self) -> Any:
        """Return the answer as the agent sees it: as JSON, or else as text; None if it is empty."""
        return self._body


def _parse(data: bytes) -> Any:
    try:
        return loads(data)
    except ValueError:
        return None
