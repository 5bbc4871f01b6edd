"""Takes what was injected out of the usual chunk of a chat stream without parsing it. Nearly all chunks are such ones.

The usual chunk is one that vLLM writes for more text of the one answer. It begins with the very bytes of a chunk that
was parsed, and all that follows has a known shape. What it adds to the record is read in one go, when that is wanted.
"""

from __future__ import annotations

import re
from typing import Any

from ..json_text import encode, loads, loads_rounded

Json = dict[str, Any]

# JSON's strings and numbers, with possessive quantifiers: a match takes one look at every byte.
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_WHOLE = rb"(?:0|[1-9]\d*+)"
_NUMBER = rb"-?" + _WHOLE + rb"(?:\.\d++)?(?:[eE][+-]?\d++)?"
_WHOLES = rb"(?:%b(?:,%b)*+)?+" % (_WHOLE, _WHOLE)
_TOKEN = rb'\{"token":%b,"logprob":%b,"bytes":(?:null|\[%b\]),"top_logprobs":\[\]\}' % (_STRING, _NUMBER, _WHOLES)
_PARTS = (
    (rb'\{"(?:content|reasoning|reasoning_content)":', rb"\}"),
    (rb'\{(?:"content":null,)?"tool_calls":\[\{"index":%b,"function":\{"arguments":' % _WHOLE, rb"\}\}\]\}"),
)
_HELD_BACK = b"{}"  # while a tool parser holds text back, vLLM sends such chunks to those who asked for token ids
_DELTA = b"|".join(b"(%b)(%b)(%b)" % (before, _STRING, after) for before, after in _PARTS) + rb"|(\{\})"
_REST = re.compile(
    rb'\{"index":0,"delta":(?:%b),"logprobs":(\{"content":\[%b(?:,%b)*+\]\}),"finish_reason":null,"token_ids":\[(%b)\]'
    rb"\}\]\}\n\n" % (_DELTA, _TOKEN, _TOKEN, _WHOLES)
)
_LOGPROB = re.compile(rb'"logprob":(%b),"bytes":' % _NUMBER)  # no string can hold this: its quotes have backslashes
MISSES = 8  # after so many other chunks in a row, no more are expected
_CHOICES = b',"choices":['
_CLEAN = b'null,"finish_reason":null,"token_ids":null}]}\n\n'


class UsualChunks:
    """The usual chunks of one stream."""

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
        """Return whether there may be more of them."""
        return self._start != b""

    def learn(self, raw: bytes, *, is_last: bool) -> None:
        """Take the beginning of a chunk that was parsed for that of the usual ones. After the last, there are none."""
        if is_last:
            self._start = b""
        elif self._start is None:
            start = raw[: raw.find(_CHOICES) + len(_CHOICES)]
            alone = start.endswith(_CHOICES) and start.count(b"{") == 1
            self._start = start if alone and b"token_ids" not in start and b"logprobs" not in start else b""

    def pass_on(self, data: bytes) -> tuple[bytes, bytes]:
        """Keep the usual chunks that `data` begins with. Return what the agent gets of them, and the rest of `data`."""
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
        """Return chunks that say what all that were passed on since the last time do."""
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
