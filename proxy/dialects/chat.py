"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import Any

from ...core.errors import LightningError
from ...core.tokens import Tokens
from ...core.values import error_in, message_of_error
from .assemble import Assembler
from .inject import Endpoint, Injection, StreamCleaner, UsualChunks, clean, inject, without

Json = dict[str, Any]


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
