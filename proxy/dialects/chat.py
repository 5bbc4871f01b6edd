"""POST /v1/chat/completions and /v1/completions: the fields that the proxy adds for vLLM, and removes from answers.

Field names are vLLM 0.32's. vLLM sends null in fields that were not requested, unless a comment says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from ...core import sse
from ...core.json_text import encode, loads, loads_rounded
from ...core.tokens import Tokens
from ...core.tools import dicts
from ...core.values import as_read, error_in, lax, message_of_error
from .assemble import Assembler
from .stream import Dialect, Injection, Transcript

Json = dict[str, Any]


def _wants_usage(body: Json, options: Any) -> bool:
    """Whether to ask for usage: the agent did not, and it wants a stream with a single answer."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)  # tokens are one prompt
    if body.get("stream") is not True or several or body.get("n") not in (None, 1):
        return False
    return isinstance(options, dict | None) and as_read(options or {}).get("include_usage") in (None, False)


def take_out(body: Json, injection: Injection) -> bool:
    """Delete the fields of an answer that only the proxy asked for, or set them to null. Return whether it had any."""
    changed, fields = False, injection.fields
    for part in (body, *dicts(body.get("choices"))) if fields else ():
        is_sglangs = "message" in part and "prompt_token_ids" in part  # which has no null in their place
        for name in fields:
            if part.get(name) is not None:
                part[name], changed = None, True
                if is_sglangs and name != "logprobs":
                    del part[name]
    return changed


MISSES = 8  # after this many other chunks in a row, no more are expected

_CHOICES = b',"choices":['
_CLEAN = b'null,"finish_reason":null,"token_ids":null}]}\n\n'
# JSON's strings and numbers, with possessive quantifiers: a match takes one look at every byte.
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_INTEGER = rb"(?:0|[1-9]\d*+)"
_NUMBER = rb"-?" + _INTEGER + rb"(?:\.\d++)?(?:[eE][+-]?\d++)?"
_INTEGERS = rb"(?:%b(?:,%b)*+)?+" % (_INTEGER, _INTEGER)
_TOKEN = rb'\{"token":%b,"logprob":%b,"bytes":(?:null|\[%b\]),"top_logprobs":\[\]\}' % (_STRING, _NUMBER, _INTEGERS)
_OF_TEXT = rb'\{"(?:content|reasoning|reasoning_content)":'
_OF_TOOL = rb'\{(?:"content":null,)?"tool_calls":\[\{"index":%b,"function":\{"arguments":' % _INTEGER
# While a tool parser holds text back, vLLM sends deltas without anything to those who asked for token ids.
_DELTA = rb"(?:(?P<before>%b|(?P<tool>%b))(?P<text>%b)(?P<after>(?(tool)\}\}\]\}|\}))|\{\})"
_DELTA = _DELTA % (_OF_TEXT, _OF_TOOL, _STRING)
_REST = re.compile(
    rb'\{"index":0,"delta":%b,"logprobs":(?P<logprobs>\{"content":\[%b(?:,%b)*+\]\}),'
    rb'"finish_reason":null,"token_ids":\[(?P<ids>%b)\]\}\]\}\n\n' % (_DELTA, _TOKEN, _TOKEN, _INTEGERS)
)
_LOGPROB = re.compile(rb'"logprob":(%b),"bytes":' % _NUMBER)  # no string can hold this: its quotes have backslashes


class UsualChunks:
    r"""Passes on the usual chunks of a stream unparsed, because that is faster. Agent and record get the same result.

    With token ids and log-probabilities, vLLM sends this chunk, in one line, for the text "Hi":

        data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[    `_start`, as in all
        {"index":0,"delta":                               what `_REST` finds, and its groups:
            {"content":                                                                          before
                "Hi"                                                                             text
            }                                                                                    after
        ,"logprobs":
            {"content":[{"token":"Hi","logprob":-0.5,"bytes":null,"top_logprobs":[]}]}           logprobs
        ,"finish_reason":null,"token_ids":[
            7                                                                                    ids
        ]}]}\n\n

    The agent asked for neither and gets the bytes up to `logprobs`, then null,"finish_reason":null,"token_ids":null}]}.
    Chunks with the same `before` and `after` are read together when needed: as one with the text "Hi…", the
    log-probabilities [-0.5, …] and the ids [7, …].
    """

    def __init__(self) -> None:
        self._start: bytes | None = None
        self._misses = 0
        self._passed: list[tuple[bytes, ...]] = []  # not read yet: the groups of each

    @property
    def expected(self) -> bool:
        """Return whether more usual chunks may come."""
        return self._start != b""

    def learn(self, raw: bytes, *, is_last: bool) -> None:
        """Learn from a parsed chunk how usual chunks begin. After the last chunk, no more are expected.

        The same holds after a chunk that begins differently, because the record has the newest parsed chunk's id.
        """
        if is_last or (self._start and not raw.startswith(self._start)):
            self._start = b""
        elif self._start is None:
            start = raw[: raw.find(_CHOICES) + len(_CHOICES)]
            alone = start.endswith(_CHOICES) and start.count(b"{") == 1
            self._start = start if alone and b"token_ids" not in start and b"logprobs" not in start else b""

    def pass_on(self, data: bytes) -> tuple[bytes, bytes]:
        """Keep the usual chunks that `data` starts with. Return the bytes to send for them, and the rest of `data`."""
        start = self._start
        if not start or not _is_utf8(data):
            return b"", data
        sent: list[bytes] = []
        at, skip = 0, len(start)
        while data.startswith(start, at) and (match := _REST.match(data, at + skip)):
            self._passed.append(match.group("before", "text", "after", "logprobs", "ids"))
            if match["before"] is not None:
                sent += data[at : match.start("logprobs")], _CLEAN
            at = match.end()
        self._misses = 0 if at else self._misses + 1
        if self._misses > MISSES:
            self._start = b""
        return b"".join(sent), data[at:]

    def take(self) -> Iterator[Json]:
        """Yield chunks with the content of all chunks passed on since the last call."""
        passed, self._passed = self._passed, []
        for before, chunks in groupby(passed, key=itemgetter(0)):
            _, texts, (after, *_), logprobs, ids = zip(*chunks, strict=True)
            delta = {}
            if before is not None:
                delta = loads(before + encode("".join(loads(b"[%b]" % b",".join(texts)))) + after)
            logprob = b",".join(_LOGPROB.findall(b"".join(logprobs)))
            yield {"choices": [{
                "index": 0,
                "delta": delta,
                "logprobs": {"token_logprobs": loads_rounded(b"[%b]" % logprob)},
                "finish_reason": None,
                "token_ids": loads_rounded(b"[%b]" % b",".join(filter(None, ids))),
            }]}  # fmt: skip


def _is_utf8(raw: bytes) -> bool:
    try:
        return raw.isascii() or bool(raw.decode())
    except UnicodeDecodeError:
        return False


class ChatApi(Dialect):
    def __init__(self, endpoint: Literal["chat", "completions"]) -> None:
        self._is_chat = endpoint == "chat"

    def inject(self, body: Json) -> tuple[Json, Injection]:
        # Values that vLLM refuses stay as they are. With return_token_ids it leaves the prompt out of an echoed answer:
        # such calls go without token ids.
        read, added = as_read(body), Json()
        if read.get("echo"):
            return body, Injection()
        own, options = body.get("logprobs"), body.get("stream_options")
        logprobs = own is None or (self._is_chat and lax(bool, own) is False)
        if self._is_chat and read.get("top_logprobs"):
            logprobs = False
        injection = Injection(read.get("return_token_ids") in (None, False), logprobs, _wants_usage(read, options))
        if injection.token_ids:
            added["return_token_ids"] = True
        if injection.logprobs:
            added["logprobs"] = True if self._is_chat else 0
        if injection.usage:
            # Ignored by vLLM without include_usage, so it must not become active with ours.
            kept = {k: v for k, v in (options or {}).items() if k != "continuous_usage_stats"}
            added["stream_options"] = kept | {"include_usage": True}
        return body | added, injection

    def agents(self, body: Json, injection: Injection) -> Json | None:
        return body if take_out(body, injection) else None

    def tokens(self, body: Json) -> Tokens:
        return Tokens(body)

    def stream(self, injection: Injection) -> ChatStream:
        return ChatStream(injection)


class ChatStream(Transcript):
    """A stream of chunks, without the fields and chunks that vLLM sends only because the proxy asked for them.

    It ends with [DONE], which some servers omit. If usage was injected, the chunk with the finish reason is held until
    the next one: the usage chunk, which the agent does not get, may have a field that belongs in the held chunk.
    """

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self.rewrites = bool(injection)
        self._tokens = Tokens()
        self._injection = injection
        self._held, self._last = b"", Json()  # the chunk with the finish reason, as the agent gets it
        self._assembler = Assembler()
        # Both were injected, so the agent gets neither.
        self.usual = UsualChunks() if injection.token_ids and injection.logprobs else None

    @property
    def tokens(self) -> Tokens:
        self._catch_up()
        return self._tokens

    def feed(self, data: bytes) -> bytes:
        self.size += len(data)
        out = b""
        while data and not self.ended and self.usual is not None and self.usual.expected:
            if not self.decoder.pending:
                passed, data = self.usual.pass_on(data)
                out += passed
            if data:
                event, blank, data = data.partition(b"\n\n")
                out += self.parse(event + blank)
        return out + self.parse(data) if data else out

    @property
    def complete(self) -> bool:
        choices = self.tokens.choices
        return bool(choices) and all(choice.finish_reason for choice in choices)

    def take(self, raw: bytes, event: Json) -> bytes:
        is_error = self.read(raw, event) is not None
        clean = sse.encode(encode(event)) if take_out(event, self._injection) else raw
        self._assembler.feed(event)
        out = self.flush() + clean if is_error else self._without_extra(clean, event)
        if self.usual is not None:
            self.usual.learn(raw, is_last=is_error or bool(self._held))
        return out

    def read(self, raw: bytes, event: Json) -> Any:
        """Keep a chunk's tokens, and its error if it is or contains one. Return the error, if any."""
        self._catch_up()
        self._tokens.add(event)
        if (error := error_in(raw, event)) is not None:
            self.failure = self.failure or message_of_error(error)
        return error

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def response(self) -> Any:
        self._catch_up()
        return self._assembler.result()

    def _without_extra(self, clean: bytes, chunk: Json) -> bytes:
        """The bytes to send now. A chunk that vLLM sends only because of the injected fields adds none."""
        usage, choices = self._injection.usage, dicts(chunk.get("choices"))
        if usage and chunk.get("choices") == [] and "usage" in chunk:
            fingerprint = chunk.get("system_fingerprint")  # vLLM has it in the last chunk
            if self._held and fingerprint is not None:
                self._held = sse.encode(encode(self._last | {"system_fingerprint": fingerprint}))
            return self.flush()
        is_last = any(choice.get("finish_reason") for choice in choices)
        if self.usual and choices and not is_last and all(choice.get("delta") == {} for choice in choices):
            # While a parser holds text back, vLLM sends these only to those who asked for token ids or logprobs.
            return b""
        before = self.flush()
        if usage and is_last:
            self._held, self._last = clean, chunk
            return before
        return before + clean

    def _catch_up(self) -> None:
        """Read the chunks that were passed on unread."""
        for chunk in self.usual.take() if self.usual else ():
            self._tokens.add(chunk)
            take_out(chunk, self._injection)
            self._assembler.feed(chunk)
