"""POST /v1/chat/completions and /v1/completions: what vLLM is asked for in addition, and how answers lose it again.

Field names and the values sent without asking are those of vLLM 0.32: null, except where a comment says otherwise.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from ...core import sse
from ...core.errors import LightningError
from ...core.json_text import encode, loads, loads_rounded
from ...core.tokens import Tokens
from ...core.values import as_read, error_in, lax, message_of_error
from .assemble import Assembler

Json = dict[str, Any]
Endpoint = Literal["chat", "completions"]


class Injection(NamedTuple):
    """The fields that the proxy added to the agent's request."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage

    def is_named_in(self, text: bytes) -> bool:
        """Return whether a refusal names one of the added fields."""
        names = (b"token_ids",) * self.token_ids + (b"logprobs",) * self.logprobs
        names += (b"stream_options", b"include_usage") * self.usage
        return any(name in text for name in names)

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the field names to take out of an answer and of its choices."""
        return ("prompt_token_ids", "token_ids") * self.token_ids + ("logprobs",) * self.logprobs


def inject(body: Json, endpoint: Endpoint) -> tuple[Json, Injection]:
    """Return the request for a vLLM upstream, and the fields added to it. Values that vLLM refuses stay as they are."""
    # With return_token_ids vLLM leaves the prompt out of an echoed answer: such calls go without token ids.
    read = as_read(body)
    if read.get("echo"):
        return body, Injection()
    token_ids = read.get("return_token_ids") in (None, False)
    logprobs = (own := body.get("logprobs")) is None
    if endpoint == "chat":
        logprobs = (logprobs or lax(bool, own) is False) and not read.get("top_logprobs")
    options = body.get("stream_options")
    usage = _wants_usage(read, options)
    added: Json = {}
    if token_ids:
        added["return_token_ids"] = True
    if logprobs:
        added["logprobs"] = True if endpoint == "chat" else 0
    if usage:
        # Ignored by vLLM without include_usage, so it must not become active with ours.
        kept = {k: v for k, v in (options or {}).items() if k != "continuous_usage_stats"}
        added["stream_options"] = kept | {"include_usage": True}
    return body | added, Injection(token_ids, logprobs, usage)


def _wants_usage(body: Json, options: Any) -> bool:
    """Whether to ask for usage. Not for several answers: all but the last would be held back (see StreamCleaner)."""
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int) else [prompt]
    several = body.get("n") not in (None, 1) or len(prompts) > 1  # a list of tokens is one prompt
    if body.get("stream") is not True or several or not isinstance(options, dict | None):
        return False
    return as_read(options or {}).get("include_usage") in (None, False)


def clean(body: Json, injection: Injection) -> bool:
    """Remove from an answer, in place, the fields that only the proxy asked for; return whether there were any."""
    return _take_out(body, injection.fields)


def without(injection: Injection, raw: bytes, event: Json) -> bytes:
    """Return the bytes of an event for the agent, which is cleaned in place."""
    return _encode(event) if clean(event, injection) else raw


def _take_out(body: Json, fields: tuple[str, ...]) -> bool:
    changed = False
    choices = body.get("choices")
    for part in (body, *choices) if isinstance(choices, list) else (body,):
        if isinstance(part, dict):
            is_sglangs = "message" in part and "prompt_token_ids" in part  # which has no null in their place
            for name in fields:
                if part.get(name) is not None:
                    part[name], changed = None, True
                    if is_sglangs and name != "logprobs":
                        del part[name]
    return changed


class StreamCleaner:
    """Removes from a stream the fields that only the proxy asked for. Other frames keep their exact bytes."""

    def __init__(self, injection: Injection) -> None:
        self._injection = injection
        self._fields = injection.fields
        self._held: tuple[bytes, Json, bool] | None = None  # its bytes, the chunk, whether it was changed

    @property
    def holds(self) -> bool:
        """Return whether a chunk waits for the next one."""
        return self._held is not None

    def clean(self, raw: bytes, chunk: Json) -> bytes:
        """Return the bytes to send now for a chunk, which is cleaned in place."""
        if not self._injection:
            return raw
        changed = _take_out(chunk, self._fields)
        choices = chunk.get("choices")
        if not choices or not isinstance(choices, list):
            if self._injection.usage and choices == [] and "usage" in chunk:
                return self._release(chunk.get("system_fingerprint"))
            choices = ()
        elif self._injection.token_ids and self._injection.logprobs and all(map(_is_empty_delta, choices)):
            # While a parser holds text back, vLLM sends these only to those who asked for token ids or logprobs.
            return b""
        before = b"" if self._held is None else self.flush()
        if self._injection.usage and any(map(_finishes, choices)):
            self._held = raw, chunk, changed
            return before
        return before + (_encode(chunk) if changed else raw)

    def flush(self) -> bytes:
        """Return the bytes held back, for a stream that continues or ends without the usage chunk."""
        return self._release(None)

    def _release(self, fingerprint: Any) -> bytes:
        """The held chunk with the fingerprint, which vLLM puts into the last chunk where usage is not asked for."""
        held, self._held = self._held, None
        if held is None:
            return b""
        raw, chunk, changed = held
        if fingerprint is not None:
            chunk["system_fingerprint"], changed = fingerprint, True
        return _encode(chunk) if changed else raw


def _is_empty_delta(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("delta") == {} and choice.get("finish_reason") is None


def _finishes(choice: Any) -> bool:
    return isinstance(choice, dict) and bool(choice.get("finish_reason"))


def _encode(chunk: Json) -> bytes:
    return sse.encode(encode(chunk))


# JSON's strings and numbers, with possessive quantifiers: a match takes one look at every byte.
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_INTEGER = rb"(?:0|[1-9]\d*+)"
_NUMBER = rb"-?" + _INTEGER + rb"(?:\.\d++)?(?:[eE][+-]?\d++)?"
_INTEGERS = rb"(?:%b(?:,%b)*+)?+" % (_INTEGER, _INTEGER)
_TOKEN = rb'\{"token":%b,"logprob":%b,"bytes":(?:null|\[%b\]),"top_logprobs":\[\]\}' % (_STRING, _NUMBER, _INTEGERS)
_PARTS = (
    (rb'\{"(?:content|reasoning|reasoning_content)":', rb"\}"),
    (rb'\{(?:"content":null,)?"tool_calls":\[\{"index":%b,"function":\{"arguments":' % _INTEGER, rb"\}\}\]\}"),
)
_HELD_BACK = b"{}"  # while a tool parser holds text back, vLLM sends such chunks to those who asked for token ids
_DELTA = b"|".join(b"(%b)(%b)(%b)" % (before, _STRING, after) for before, after in _PARTS) + rb"|(\{\})"
_REST = re.compile(
    rb'\{"index":0,"delta":(?:%b),"logprobs":(\{"content":\[%b(?:,%b)*+\]\}),"finish_reason":null,"token_ids":\[(%b)\]'
    rb"\}\]\}\n\n" % (_DELTA, _TOKEN, _TOKEN, _INTEGERS)
)
_LOGPROB = re.compile(rb'"logprob":(%b),"bytes":' % _NUMBER)  # no string can hold this: its quotes have backslashes
MISSES = 8  # after so many other chunks in a row, no more are expected
_CHOICES = b',"choices":['
_CLEAN = b'null,"finish_reason":null,"token_ids":null}]}\n\n'


class UsualChunks:
    """The usual chunks of one stream: a shortcut, without which agent and record get the same."""

    def __init__(self) -> None:
        self._start: bytes | None = None
        self._misses = 0
        self._before = self._after = b""  # what stands around the text: chunks that have the same are read together
        self._texts: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._ids: list[bytes] = []
        self._read: list[Json] = []

    @property
    def expected(self) -> bool:
        """Return whether more usual chunks may come."""
        return self._start != b""

    def learn(self, raw: bytes, *, is_last: bool) -> None:
        """Take the beginning of a chunk that was parsed for that of the usual ones. After the last, there are none.

        Nor are there after one that begins otherwise: the record has what the newest chunk begins with, such as its id.
        """
        if is_last or (self._start and not raw.startswith(self._start)):
            self._start = b""
        elif self._start is None:
            start = raw[: raw.find(_CHOICES) + len(_CHOICES)]
            alone = start.endswith(_CHOICES) and start.count(b"{") == 1
            self._start = start if alone and b"token_ids" not in start and b"logprobs" not in start else b""

    def pass_on(self, data: bytes) -> tuple[bytes, bytes]:
        """Keep the usual chunks that `data` begins with. Return the agent's bytes for them, and the rest of `data`."""
        start = self._start
        if not start or not (data.isascii() or _is_utf8(data)):
            return b"", data
        sent: list[bytes] = []
        at, skip = 0, len(start)
        while data.startswith(start, at) and (match := _REST.match(data, at + skip)):
            before, text, after, before_2, text_2, after_2, held_back, logprobs, ids = match.groups()
            if held_back is not None:
                before, text, after = held_back, b'""', b""
            elif text is None:
                before, text, after = before_2, text_2, after_2
            if before != self._before:
                self._read_all()
                self._before, self._after = before, after
            self._texts.append(text)
            self._logprobs.append(logprobs)
            if ids:
                self._ids.append(ids)
            if held_back is None:
                sent += data[at : match.start(8)], _CLEAN
            at = match.end()
        self._misses = 0 if at else self._misses + 1
        if self._misses > MISSES:
            self._start = b""
        return b"".join(sent), data[at:]

    def take(self) -> list[Json]:
        """Return chunks with the content of all that were passed on since the last time."""
        self._read_all()
        taken, self._read = self._read, []
        return taken

    def _read_all(self) -> None:
        if not self._texts:
            return
        text = "".join(loads(b"[%b]" % b",".join(self._texts)))
        logprobs = _LOGPROB.findall(b"".join(self._logprobs))
        choice = {
            "index": 0,
            "delta": {} if self._before == _HELD_BACK else loads(self._before + encode(text) + self._after),
            "logprobs": {"token_logprobs": loads_rounded(b"[%b]" % b",".join(logprobs))},
            "finish_reason": None,
            "token_ids": loads_rounded(b"[%b]" % b",".join(self._ids)),
        }
        self._read.append({"choices": [choice]})
        for kept in (self._texts, self._logprobs, self._ids):
            kept.clear()


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


class ChatApi:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def inject(self, body: Json) -> tuple[Json, Injection]:
        return inject(body, self._endpoint)

    def agents(self, body: Json, injection: Injection) -> Json | None:
        return body if clean(body, injection) else None

    def refusal(self, body: Json, status: int) -> None:
        return None

    def tokens(self, body: Json) -> Tokens:
        tokens = Tokens()
        tokens.add(body)
        return tokens

    def stream(self, injection: Injection) -> ChatStream:
        return ChatStream(injection)

    def error_body(self, error: LightningError) -> Json:
        return error.body()


class ChatStream:
    """A stream of chunks. It ends with [DONE], which is no chunk, and which some servers leave out."""

    finished = False

    def __init__(self, injection: Injection) -> None:
        self.error: str | None = None
        self.rewrites = bool(injection)
        self._tokens = Tokens()
        self._injection = injection
        self._cleaner = StreamCleaner(injection)
        self._assembler = Assembler()
        # Both were injected, so the agent gets neither.
        self.usual: UsualChunks | None = UsualChunks() if injection.token_ids and injection.logprobs else None

    @property
    def tokens(self) -> Tokens:
        self._catch_up()
        return self._tokens

    @property
    def complete(self) -> bool:
        choices = self.tokens.choices
        return bool(choices) and all(choice.finish_reason for choice in choices)

    def feed(self, raw: bytes, event: Json) -> bytes:
        is_error = self.read(raw, event) is not None
        out = self.flush() + without(self._injection, raw, event) if is_error else self._cleaner.clean(raw, event)
        self._assembler.feed(event)
        if self.usual is not None:
            self.usual.learn(raw, is_last=is_error or self._cleaner.holds)
        return out

    def read(self, raw: bytes, event: Json) -> Any:
        """Keep a chunk's tokens, and the error that it is or has; return that, or None."""
        self._catch_up()
        self._tokens.add(event)
        if (error := error_in(raw, event)) is not None:
            self.error = self.error or message_of_error(error)
        return error

    def flush(self) -> bytes:
        return self._cleaner.flush()

    def last(self, raw: bytes) -> bytes:
        return raw

    def response(self) -> Any:
        self._catch_up()
        return self._assembler.result()

    def _catch_up(self) -> None:
        """Read the chunks that were passed on unread."""
        for chunk in self.usual.take() if self.usual is not None else ():
            self._tokens.add(chunk)
            clean(chunk, self._injection)
            self._assembler.feed(chunk)
