"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import Any

from ..errors import LightningError
from .assemble import Assembler
from .inject import Endpoint, Injection, StreamCleaner, clean, inject
from .tokens import Tokens

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
        self.tokens = Tokens()
        self.error: str | None = None
        self.rewrites = bool(injection)
        self._cleaner = StreamCleaner(injection)
        self._assembler = Assembler()

    @property
    def whole(self) -> bool:
        choices = self.tokens.choices
        return bool(choices) and all(choice.finish_reason for choice in choices)

    def feed(self, raw: bytes, event: Json) -> bytes:
        is_error = self.read(event)
        out = self.flush() + raw if is_error else self._cleaner.clean(raw, event)
        self._assembler.feed(event)
        return out

    def read(self, event: Json) -> bool:
        """Keep a chunk's tokens, or the error that it is; return whether it is one."""
        if event.get("error"):
            self.error = self.error or message_of_error(event["error"])
            return True
        self.tokens.add(event)
        return False

    def flush(self) -> bytes:
        return self._cleaner.flush()

    def last(self, raw: bytes) -> bytes:
        return raw

    def response(self) -> Any:
        return self._assembler.result()


def message_of_error(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return f"the upstream sent an error: {message}"[:1000]
