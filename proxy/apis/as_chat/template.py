"""Learns what vLLM's own route for Messages asks of the chat template before it translates a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .translation import Untranslatable

Json = dict[str, Any]

EFFORTS = ("low", "medium", "high", "xhigh", "max")

_MESSAGES, _CHAT, _COUNT = "/v1/messages/render", "/v1/chat/completions/render", "/v1/messages/count_tokens"
_USER: Json = {"role": "user", "content": "Hi"}
_SAID: Json = {"role": "assistant", "content": "Hello"}
_INLINE: Json = {"role": "system", "content": "Go on."}
_ABSENT = (403, 404, 405, 501)


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


# What to post, by name: a path, and a body that lacks the model.
PROBES: Mapping[str, tuple[str, Json]] = MappingProxyType({
    "inline": (_MESSAGES, {"max_tokens": 1, "system": "Hm.", "messages": [_USER, _SAID, _INLINE, _USER]}),
    "merged": (_CHAT, {"messages": [{"role": "system", "content": "Hm.Go on."}, _USER, _SAID, _USER]}),
    "in place": (_CHAT, {"messages": [{"role": "system", "content": "Hm."}, _USER, _SAID, _INLINE, _USER]}),
    "no tools": (_MESSAGES, {"max_tokens": 1, "messages": [_USER], "tools": []}),
    "plain": (_CHAT, {"messages": [_USER]}),
    "disabled": (_COUNT, {"messages": [_USER], "thinking": {"type": "disabled"}}),
    **{effort: (_CHAT, {"messages": [_USER], "reasoning_effort": effort}) for effort in ("none", *EFFORTS)},
})  # fmt: skip


def learn(answers: Mapping[str, tuple[int, Any]]) -> Template:
    """Return what the answers to the probes say; each is a status and a body."""
    if {status for status, _ in answers.values()} & {*_ABSENT} or answers.keys() != PROBES.keys():
        return Template()
    bodies = {name: body if status == 200 else {} for name, (status, body) in answers.items()}
    ids = {name: body.get("token_ids") for name, body in bodies.items()}
    return Template(
        _merges(ids["inline"], ids["merged"], ids["in place"]),
        _effort(ids, bodies["disabled"].get("input_tokens")),
        ids["no tools"] is not None and ids["no tools"] == ids["plain"],
    )


def _merges(inline: Any, merged: Any, in_place: Any) -> bool | None:
    if inline is None or merged == in_place or inline not in (merged, in_place):
        return None
    return bool(inline == merged)


def _effort(ids: Mapping[str, Any], counted: Any) -> str | None:
    """The effort that the server takes by itself, unless it was told another, as its count then shows."""
    ignored = ids["none"] in [None, *(ids[effort] for effort in EFFORTS)]
    effort = "low" if ignored else "none"
    return effort if len(ids[effort] or ()) == counted else None
