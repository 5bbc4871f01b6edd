"""Follows an answer as it passes: decides which bytes to send to the agent now, and what to record.

`Dialect` and `Transcript` are the interface of a recorded API to the rest of the proxy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.errors import LightningError, UpstreamUnreachable
from ...core.json_text import as_utf8, encode_as_vllm, loads, loads_in_turns
from ...core.sse import Frame, SSEDecoder
from ...core.tokens import Tokens
from ...core.values import message_of_error, named_error

Json = dict[str, Any]

# The record of a larger answer has nothing of it.
MAX_ANSWER_BYTES = 2**26
# From this many bytes on, an answer that is not a stream is read in a thread, though that takes several times as long.
LARGE_ANSWER = 2**20
TOO_LARGE = "the answer is larger than 64 MiB: it was sent to the agent, but not recorded"
# An event that may hold injected fields is held until it ends; no real one is as large as this.
MAX_HELD_BYTES = 2**30
_BLANKS = b" \t\r\n"


class Injection(NamedTuple):
    """The fields that the proxy added to the agent's request."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage

    def is_named_in(self, text: bytes) -> bool:
        """Return whether an upstream's refusal names one of the added fields."""
        names = (b"token_ids",) * self.token_ids + (b"logprobs",) * self.logprobs
        names += (b"stream_options", b"include_usage") * self.usage
        return any(name in text for name in names)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the field names to remove from an answer and from its choices."""
        return ("prompt_token_ids", "token_ids") * self.token_ids + ("logprobs",) * self.logprobs


class Transcript:
    """Turns the bytes of a streamed answer into bytes for the agent and a record. Subclasses read its events.

    The last event, and all after it, is `held` until the record is written. If the stream is rewritten, an unfinished
    frame is kept from the agent, because it may hold injected fields.
    """

    rewrites = False  # whether the agent gets other bytes than the upstream sent
    finished = False  # whether the last event that was taken was the answer's last event

    def __init__(self) -> None:
        self.ended = False
        self.held = b""
        self.size = 0
        self.failure: str | None = None  # an error that an event is or has
        self._garbage: str | None = None  # an event that is not a JSON object
        self._let_go = False  # an event was too large to look at; it may have been the last one
        self.decoder = SSEDecoder()

    def take(self, raw: bytes, event: Json) -> bytes:
        """Return the bytes to send for an event. Bytes without injected fields pass unchanged."""
        raise NotImplementedError

    def flush(self) -> bytes:
        """Return the bytes that were held back until it was clear how the stream goes on."""
        return b""

    def last(self, raw: bytes) -> bytes:
        """Return the last bytes to send to the agent. `raw`: the upstream's [DONE], empty if that is missing."""
        return raw

    @property
    def complete(self) -> bool:
        """Return whether the answer is complete even if the stream's last event is missing."""
        return False

    @property
    def tokens(self) -> Tokens:
        raise NotImplementedError

    def response(self) -> Any:
        """Return the answer so far in non-streamed form, as the agent sees it; None before the first event."""
        raise NotImplementedError

    @property
    def unkept(self) -> str | None:
        """Return why the record lacks the answer; None if it does not."""
        return TOO_LARGE if self.size > MAX_ANSWER_BYTES else None

    @property
    def may_end(self) -> bool:
        """Return whether the stream may end here: it ended, failed, is complete, or had an event too large to read."""
        return self.ended or self.failure is not None or self.complete or self._let_go

    @property
    def error(self) -> str | None:
        return self._garbage or self.failure

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send now. The last event and all that follows stay in `held`.

        If the stream is rewritten, raises UpstreamUnreachable for an event of more than `MAX_HELD_BYTES`.
        """
        self.size += len(data)
        return self.parse(data)

    def end(self) -> bytes:
        """Return the bytes to send at the stream's end. An unfinished [DONE], or what replaces it, is `held`."""
        last = self.decoder.close()
        out = self.flush() + (b"" if self.rewrites or last.is_done else last.raw)
        if last.is_done or self.complete:
            self.held = self.last(last.raw if last.is_done else b"")
            self.ended = bool(self.held)
        return out

    def parse(self, data: bytes) -> bytes:
        out = b""
        for frame in self.decoder.feed(data):
            if self.ended:
                self.held += frame.raw
            elif frame.is_done:
                out += self.flush()
                self.ended, self.held = True, self.last(frame.raw)
            else:
                sent = self._pass(frame)
                if self.finished:
                    self.ended, self.held = True, sent
                else:
                    out += sent
        if self.ended:
            self.held += self.decoder.rest
        elif self.decoder.pending > MAX_ANSWER_BYTES and not self.rewrites:
            self._let_go = True
            out += self.flush() + self.decoder.let_go()
        elif self.decoder.pending > MAX_HELD_BYTES:
            raise UpstreamUnreachable(f"the upstream sent {self.decoder.pending} bytes without the end of an event")
        return out

    def _pass(self, frame: Frame) -> bytes:
        if frame.data is None or not frame.data.strip():  # for SSE, a frame without data is not an event
            return frame.raw
        try:
            event = loads(frame.data)
        except ValueError:
            event = None
        if isinstance(event, dict):
            return self.take(frame.raw, event)
        self._garbage = self._garbage or f"the upstream sent an event that is not a JSON object: {frame.data[:200]!r}"
        return self.flush() + frame.raw


class Dialect:
    """Knows a recorded API: what to add to requests for vLLM and remove from answers, and where the tokens are."""

    def inject(self, body: Json) -> tuple[Json, Injection]:
        """Return the request for a vLLM upstream, and the fields that were added to it."""
        return body, Injection()

    def agents(self, body: Json, injection: Injection) -> Json | None:
        """Return a non-streamed answer as the agent gets it; None if its bytes are unchanged."""
        return None

    def refusal(self, body: Json) -> Json | None:
        """Return the upstream's error as the agent gets it; None if its bytes are unchanged."""
        return None

    def tokens(self, body: Json) -> Tokens:
        """Return the tokens that a non-streamed answer has. Call this before `agents`, which may change the answer."""
        raise NotImplementedError

    def stream(self, injection: Injection) -> Transcript:
        raise NotImplementedError

    def error_body(self, error: LightningError) -> Json:
        """Return one of our errors in the API's own shape."""
        return error.body()


class BufferedTranscript:
    """An answer that is not a stream. Its last non-blank byte waits for the record, like a stream's last event.

    `rewrites`: the agent gets other bytes than the upstream sent, which are only known at the end. Until then only
    blanks are passed on, which some servers send to keep the connection alive.
    """

    may_end = True

    def __init__(self, dialect: Dialect, injection: Injection, status: int, *, translated: bool) -> None:
        self.shown = False
        self.ended = False
        self.held = b""
        self.size = 0
        self.error = None if status // 100 == 2 else f"the upstream answered {status}"
        self.tokens = Tokens()
        self.unkept: str | None = None
        self.rewrites = translated or (self.error is None and bool(injection))
        self._dialect = dialect
        self._injection = injection
        self._data = bytearray()
        self._sent = self._may_be_sent = 0  # bytes
        self._body: Any = None

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send now. There are none until `shown` is set."""
        blanks_alone = self._may_be_sent == self.size
        if not self.rewrites and (text := data.rstrip(_BLANKS)):
            self._may_be_sent = self.size + len(text) - 1
        elif blanks_alone:
            self._may_be_sent += len(data) - len(data.lstrip(_BLANKS))
        self._data += data
        self.size += len(data)
        if not self.shown:
            return b""
        sent = bytes(self._data[self._sent : self._may_be_sent])
        self._sent = self._may_be_sent
        return sent

    def end(self) -> bytes:
        """Read the complete answer. If it has at least `LARGE_ANSWER` bytes, call this in a thread.

        Returns nothing to send: the rest of the answer is `held`.
        """
        data, self._data, succeeded = bytes(self._data), bytearray(), self.error is None
        self.unkept = TOO_LARGE if len(data) > MAX_ANSWER_BYTES else None
        self.ended, self.held = True, data[self._sent :]
        if self.unkept and not (succeeded and self._injection):  # nothing to read in it, or to take out of it
            return b""
        try:
            data = as_utf8(data)
            body = loads(data) if len(data) < LARGE_ANSWER else loads_in_turns(data)
        except ValueError:
            body = data.decode(errors="replace") or None
        agents = None
        if not isinstance(body, dict):
            self.error = self.error or "the upstream's answer is not a JSON object"
        elif succeeded:
            if (error := named_error(body)) is not None:
                self.error = message_of_error(error)
            self.tokens = self._dialect.tokens(body)
            agents = self._dialect.agents(body, self._injection)
        else:
            agents = self._dialect.refusal(body)
        if agents is not None:
            body, self.held = agents, encode_as_vllm(agents)
        self._body = body
        return b""

    def response(self) -> Any:
        """Return the answer as the agent sees it: JSON, or else text; None if it is empty or was not read."""
        return self._body
