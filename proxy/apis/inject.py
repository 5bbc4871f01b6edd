"""Adds fields to requests for a vLLM upstream, and removes their results from the answers.

Field names and the values sent without asking are those of vLLM 0.32: null, except where a comment says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ..json_text import encode
from . import sse

Endpoint = Literal["chat", "completions"]
Json = dict[str, Any]


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
    if body.get("echo"):
        return body, Injection()
    token_ids = body.get("return_token_ids") in (None, False)
    logprobs = _wants_logprobs(body, endpoint)
    options = body.get("stream_options")
    usage = _wants_usage(body, options)
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


def _wants_logprobs(body: Json, endpoint: Endpoint) -> bool:
    if endpoint == "completions":
        return body.get("logprobs") is None
    return body.get("logprobs") in (None, False) and not body.get("top_logprobs")


def _wants_usage(body: Json, options: Any) -> bool:
    """Whether to ask for usage. Not for several answers: all but the last would be held back (see StreamCleaner)."""
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int) else [prompt]
    several = body.get("n") not in (None, 1) or len(prompts) > 1  # a list of tokens is one prompt
    if body.get("stream") is not True or several or not isinstance(options, dict | None):
        return False
    return (options or {}).get("include_usage") in (None, False)


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
        """Return whether a chunk waits for what comes after it."""
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
        """Return the bytes held back, for a stream that goes on or ends without the usage chunk."""
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
