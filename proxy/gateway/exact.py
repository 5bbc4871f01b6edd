"""Sends a call that continues an earlier one as the earlier call's exact tokens plus the new ones.

If an answer is rendered and tokenised again, it may become other tokens. So the next prompt is, in tokens:

    earlier prompt · earlier answer, as sampled · what the template puts after an answer · new messages, rendered

vLLM's render route returns the tokens of messages, and its chat route also accepts a prompt as tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import orjson

from ...core.config.upstreams import UpstreamConfig
from ...core.errors import LightningError
from ...core.json_text import dumps, encode
from ...core.records import CallEnd, CallStart
from ..dialects.as_chat.recorded import CHAT_ENDPOINT, chat_answer
from ..dialects.turns import TokenTurn, as_sampled, closing, continued, exact_prompt, is_supported, shape, turn_of
from .attempts import Upstreams
from .recent import History
from .upstream import Answer, Request

log = logging.getLogger(__name__)
Json = dict[str, Any]

# first: there is no earlier call to continue. edited: the history is not the earlier messages and answers. changed: its
# tools, or other things that a template reads, are new. template: it renders earlier turns differently later.
# unsupported: vLLM takes no tokens with such a request. refused: vLLM answered an error; ignored: it took other tokens;
# unavailable: it has no render route.
Outcome = Literal["exact", "first", "edited", "changed", "template", "unsupported", "refused", "ignored", "unavailable"]

CLOSINGS = 1000  # ways to render, at most
RENDER = "/v1/chat/completions/render"
NO_ROUTE = (
    f"upstream %s does not offer {RENDER}: start it with `lightning-proxy vllm`, or add --enable-scale-out; until then "
    "prompts are sent as text, and a rollout may become several training rows"
)
IGNORED = "upstream %s does not take prompts as tokens; use vLLM 0.32 or newer, or set policy.token_continuity: text"


class AsText(Exception):
    """The prompt must be sent as text. The argument, an `Outcome`, says why."""


class ExactTokens:
    """Sends prompts to the policy as exact tokens if possible. `count` is called with each outcome."""

    def __init__(self, upstreams: Upstreams, history: History, count: Callable[[Outcome], None]) -> None:
        self.upstreams, self.history, self.count = upstreams, history, count
        self.closings: dict[str, list[int]] = {}  # what a template puts after an answer, by upstream and options
        self._warned: set[tuple[str, str]] = set()

    def call(self, upstream: UpstreamConfig, start: CallStart, sent: Json, chat: Json | None) -> ExactCall | None:
        """Return a call that may continue an earlier one; None for calls that are not chats or not for the policy."""
        if start.policy_version is None or upstream.kind != "vllm":
            return None
        if start.endpoint == CHAT_ENDPOINT:
            chat = start.request
        if chat is None:
            self.count("unsupported")
            return None
        return ExactCall(self, upstream, start, sent, chat)

    def warn(self, text: str, upstream: str) -> None:
        """Log a warning about an upstream only once, because every call would repeat it."""
        if (text, upstream) not in self._warned:
            self._warned.add((text, upstream))
            log.warning(text, upstream)


@dataclass(slots=True)
class ExactCall:
    """One call. `open` sends it, as exact tokens if possible; `ended` keeps its tokens for later calls."""

    exact: ExactTokens
    upstream: UpstreamConfig
    start: CallStart
    sent: Json
    chat: Json
    prompt: Sequence[int] = ()
    rendered: Sequence[int] = ()
    outcome: Outcome | None = None

    async def open(self, request: Request) -> Answer:
        """Send the request as `Upstreams.open` does, but as exact tokens if possible. A second attempt sends text."""
        open_upstream = partial(self.exact.upstreams.open, self.upstream)
        if self.outcome is None:
            try:
                self.prompt = await self._exact_prompt(request)
                added = orjson.dumps({"kv_transfer_params": {"prompt_token_ids": self.prompt}})  # instead of rendering
                answer = await open_upstream(request.with_members(added))
                if answer.status not in (400, 422):
                    self.outcome = "exact"
                    return answer
                answer.release()  # whatever is wrong, the agent shall see vLLM's answer to its own request
                raise AsText("refused")
            except AsText as reason:
                self.outcome, self.prompt, self.rendered = reason.args[0], (), ()
            if self.outcome != "first":
                log.info("call %s: the prompt is sent as text: %s", self.start.call_id, self.outcome)
        return await open_upstream(request)

    def ended(self, end: CallEnd) -> None:
        """Unless a fallback answered, count the call's outcome, and keep its tokens for the calls that continue it."""
        if self.outcome is None or end.fallback is not None:  # it did not reach the upstream, or another answered
            return
        if self.prompt and end.status == "ok" and [*end.prompt_token_ids] != self.prompt:
            self.outcome = "ignored"
            self.exact.warn(IGNORED, self.upstream.name)
        self.exact.count(self.outcome)
        if end.status == "ok":
            answer = chat_answer(self.start.endpoint, end.response)
            turn = turn_of(self.chat, answer, end.prompt_token_ids, end.choices, self.rendered)
            self.exact.history.add(end.rollout_id, end.call_id, turn)

    async def _exact_prompt(self, request: Request) -> list[int]:
        """The request's prompt as exact tokens. Raises AsText if that is not possible."""
        if not is_supported(self.chat):
            raise AsText("unsupported")
        turn = await earlier_turn(self.exact.history, self.start.rollout.rollout_id, self.chat)
        rendered = self.rendered = await self._rendered(request, request.sent_body())
        end = await self._closing(request)
        prompt = exact_prompt(turn, as_sampled(turn, end), rendered, end)
        if prompt is None:
            messages = self.sent["messages"][: len(turn.messages) + 1]
            old = encode(self.sent | {"messages": messages, "add_generation_prompt": False})
            prompt = exact_prompt(turn, await self._rendered(request, old), rendered, end)
        if prompt is None:
            raise AsText("template")
        return prompt

    async def _rendered(self, request: Request, body: bytes) -> list[int]:
        """The tokens of a chat request's messages, rendered by this call's server. Raises AsText if that fails."""
        render = request._replace(path=RENDER, query=b"", sent=None).with_body(body)
        try:
            status, raw = await self.exact.upstreams.ask(self.upstream, render)
            if status in (403, 404, 405, 501):
                self.exact.warn(NO_ROUTE, self.upstream.name)
                raise AsText("unavailable")
            ids = orjson.loads(raw)["token_ids"]
        except (LightningError, orjson.JSONDecodeError, TypeError, KeyError):
            ids = None  # the call itself will fail in the same way, and show why
        if not ids or not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise AsText("refused")
        return ids

    async def _closing(self, request: Request) -> list[int]:
        """The tokens that the template adds after an answer, with these options. Raises AsText if rendering fails."""
        options = {"chat_template_kwargs": self.sent.get("chat_template_kwargs")}
        key, closings = f"{self.upstream.name} {dumps(options)}", self.exact.closings
        if key not in closings:
            if len(closings) >= CLOSINGS:
                closings.clear()
            options |= {"model": self.sent.get("model"), "add_generation_prompt": False}
            talks = [[{"role": "user", "content": "0"}, {"role": "assistant", "content": text}] for text in ("0", "1")]
            bodies = [encode(options | {"messages": talk}) for talk in talks]
            closings[key] = closing(*await asyncio.gather(*(self._rendered(request, body) for body in bodies)))
        return closings[key]


async def earlier_turn(history: History, rollout_id: str, chat: Json) -> TokenTurn:
    """Return the turn that a supported request continues, and mark it as the newest. Raises AsText if none fits."""
    messages = chat["messages"]
    if all(message.get("role") != "assistant" for message in messages):
        raise AsText("first")
    kept = await history.read(rollout_id)
    if (turn := continued(kept.turns, messages)) is None:
        raise AsText("edited" if kept.turns else "first")
    if turn.shape != shape(chat):
        raise AsText("changed")
    kept.turns = [*(other for other in kept.turns if other is not turn), turn]
    return turn
