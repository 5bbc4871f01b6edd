"""Defines how a request of another API is answered through vLLM's chat route, which gives token ids. Pure.

vLLM's own route for Messages uses the chat template in ways that depend on the server. Two routes that every vLLM has
are probed: one counts the tokens of a Messages request, the other returns a chat's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

Json = dict[str, Any]

EFFORTS = ("low", "medium", "high", "xhigh", "max")

_USER: Json = {"role": "user", "content": "Hi"}
_ASSISTANT: Json = {"role": "assistant", "content": "Hello"}
_INLINE: Json = {"role": "system", "content": "Go on."}


class Untranslatable(Exception):
    """Signals a request that the chat route cannot answer as its own route would; `reason` goes into the record."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StreamTranslation(Protocol):
    """Turns the chunks of one streamed chat answer into the events of the agent's API, as they come."""

    def feed(self, chunk: Json) -> Iterable[Json]:
        """Return the events for a chunk, an error among them; each has a `type`. The chunk may have more than asked."""

    def end(self) -> Iterable[Json]:
        """Return the events that are left when the chat answer is complete; the last of them ends the stream."""


class Translation(Protocol):
    """Translates one request to chat, and its answer back."""

    chat: Json
    """The body for the chat route, without the additions of the proxy."""

    def answer(self, chat: Json) -> Json:
        """Return a non-streamed chat answer as the agent's API has it."""

    def stream(self) -> StreamTranslation: ...

    def refused(self, error: Json) -> Json:
        """Return the body of the chat route's error as the agent's API has it."""


class Translator(Protocol):
    """Translates the requests of one API. It agrees with what vLLM's own route makes of them."""

    def request(self, body: Json, earlier: Sequence[Json] = ()) -> Translation:
        """Return a request as a chat request; raise Untranslatable.

        `earlier`: the items before the body's own, oldest first, where the body only refers to them.
        """

    def history_message(self, answer: Json) -> Json:
        """Return the chat message that an answer of this API becomes in the next request's history."""


@dataclass(frozen=True)
class Template:
    """What is known of one server's chat template; None is unknown.

    `merges_system`: all system messages are moved to the front. `disabled_effort`: the effort that stands for disabled
    thinking. `ignores_no_tools`: an empty list of tools is as none.
    """

    merges_system: bool | None = None
    disabled_effort: str | None = None
    ignores_no_tools: bool | None = None


class TemplateUnknown(Untranslatable):
    """Signals a request that can be translated once the server's template is known."""


def _counted(**body: Any) -> tuple[str, Json]:
    return "/v1/messages/count_tokens", body


def _rendered(**body: Any) -> tuple[str, Json]:
    return "/v1/chat/completions", body | {"max_tokens": 1, "return_token_ids": True}


# What to post, by name: a path, and a body that lacks the model.
PROBES: Mapping[str, tuple[str, Json]] = MappingProxyType({
    "inline": _counted(system="Hm.", messages=[_USER, _ASSISTANT, _INLINE, _USER]),
    "merged": _rendered(messages=[{"role": "system", "content": "Hm.Go on."}, _USER, _ASSISTANT, _USER]),
    "in place": _rendered(messages=[{"role": "system", "content": "Hm."}, _USER, _ASSISTANT, _INLINE, _USER]),
    "no tools": _counted(messages=[_USER], tools=[]),
    "plain": _rendered(messages=[_USER]),
    "disabled": _counted(messages=[_USER], thinking={"type": "disabled"}),
    **{effort: _rendered(messages=[_USER], reasoning_effort=effort) for effort in ("none", *EFFORTS)},
})  # fmt: skip


def learn(answers: Mapping[str, tuple[int, Any]]) -> Template:
    """Return the template that the answers to the probes show; each is a status and a body. It may refuse some."""
    if answers.keys() != PROBES.keys() or {status for status, _ in answers.values()} - {200, 400}:
        return Template()
    bodies = {name: body if status == 200 else {} for name, (status, body) in answers.items()}
    prompts = {name: body.get("prompt_token_ids") for name, body in bodies.items()}
    counts = {name: body.get("input_tokens", len(prompts[name] or ()) or None) for name, body in bodies.items()}
    if counts["plain"] is None:
        return Template()
    return Template(_merges(counts), _effort(prompts, counts), counts["no tools"] == counts["plain"])


def _merges(counts: Mapping[str, int | None]) -> bool | None:
    inline, merged, in_place = (counts[name] for name in ("inline", "merged", "in place"))
    if inline is None or merged == in_place or inline not in (merged, in_place):
        return None
    return inline == merged


def _effort(prompts: Mapping[str, Any], counts: Mapping[str, int | None]) -> str | None:
    """The effort that the server sets where thinking is disabled, if token counts show it."""
    ignored = prompts["none"] in [None, *(prompts[effort] for effort in EFFORTS)]
    effort = "low" if ignored else "none"
    return effort if counts[effort] == counts["disabled"] is not None else None
