"""Sends a call that continues an earlier one as that call's exact tokens plus the new ones.

Two routes of vLLM: `/v1/chat/completions/render` says which tokens messages become, and the ordinary
`/v1/chat/completions` takes a prompt as tokens in `kv_transfer_params.prompt_token_ids`, skipping its own rendering.
So the answer is vLLM's own in every respect, and nothing has to be put together here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from ...core.config.upstreams import UpstreamConfig
from ...core.errors import NotFound
from ...core.json_text import encode
from ...core.records import CallEnd, CallStart, ModelCall
from ...store.calls import newest_parents
from ...store.requests import Parent, common_prefix
from ...store.store import Store
from ..dialects.as_chat.dialect import CHAT_ENDPOINT, chat_answer
from ..dialects.earlier import LATELY, Exchange, by_response
from .attempts import Upstreams
from .renderer import Renderer
from .turns import (
    AsText,
    Outcome,
    TokenTurn,
    earlier_turn,
    exact_prompt,
    has_answers,
    is_last,
    is_supported,
    turns,
    undrifted_prompt,
)
from .upstream import Answer, Request

log = logging.getLogger(__name__)
Json = dict[str, Any]
# A recorded call as a chat request, given its rollout's exchanges by response; None if it is not one.
ChatOf = Callable[[ModelCall, Mapping[str, Exchange]], Json | None]


IGNORED = (
    "upstream %s does not take prompts as tokens: vLLM 0.32 or newer does; use it, or policy.token_continuity: text"
)


class ExactTokens:
    """Sends calls of the policy as exact tokens where that is possible."""

    def __init__(self, upstreams: Upstreams, turns: RecentTurns, count: Callable[[Outcome], None]) -> None:
        """`count` is called with the outcome of each call."""
        self.upstreams = upstreams
        self.turns = turns
        self.count = count
        self.renderer = Renderer(upstreams)
        self._warned = False

    def call(self, upstream: UpstreamConfig, start: CallStart, sent: Json, chat: Json | None) -> ExactCall | None:
        """Return a call that may continue an earlier one; None if it is no chat or does not go to the policy.

        `chat`: the request for the chat route, where the call is of another API.
        """
        if start.policy_version is None or upstream.kind != "vllm":
            return None
        if start.endpoint == CHAT_ENDPOINT:
            chat = start.request
        if chat is None:
            self.count("unsupported")
            return None
        return ExactCall(self, upstream, start, sent, chat)

    def forget(self, rollout_id: str) -> None:
        """Drop all memory of a rollout that was deleted."""
        self.turns.forget(rollout_id)

    def warn_ignored(self, upstream: UpstreamConfig) -> None:
        """Log a warning once in the life of the proxy, because every call would repeat it."""
        if not self._warned:
            self._warned = True
            log.warning(IGNORED, upstream.name)


class ExactCall:
    """One call. `open` sends it, as exact tokens if possible; `ended` takes its outcome."""

    def __init__(self, exact: ExactTokens, upstream: UpstreamConfig, start: CallStart, sent: Json, chat: Json) -> None:
        self._exact = exact
        self._chat = chat
        self._upstream = upstream
        self._start = start
        self._sent = sent
        self._prompt: tuple[int, ...] = ()
        self._rendered: list[int] = []
        self._outcome: Outcome | None = None

    async def open(self, request: Request) -> Answer:
        """Return the upstream's answer to `sent`, like `Upstreams.open`. A second try goes as text."""
        open_upstream = self._exact.upstreams.open
        if self._outcome is not None:
            return await open_upstream(self._upstream, request)
        try:
            prompt, rendered = await self._exact_prompt(request)
            answer = await open_upstream(self._upstream, _with_prompt(request, prompt))
            if answer.status in (400, 422):  # whatever is wrong, the agent shall see vLLM's answer to its own request
                answer.release()
                raise AsText("refused")
            self._outcome, self._prompt, self._rendered = "exact", tuple(prompt), rendered
            return answer
        except AsText as reason:
            self._outcome = reason.outcome
        if self._outcome != "first":
            log.info("call %s goes as text: %s", self._start.call_id, self._outcome)
        return await open_upstream(self._upstream, request)

    def ended(self, end: CallEnd) -> None:
        """Note that the call's record is committed."""
        if self._outcome is None or end.fallback is not None:  # it did not reach the upstream, or another answered
            return
        if self._prompt and end.status == "ok" and end.prompt_token_ids != self._prompt:
            self._outcome = "ignored"
            self._exact.warn_ignored(self._upstream)
        self._exact.count(self._outcome)
        if end.status == "ok":
            answer = chat_answer(self._start.endpoint, end.response)
            answered = turns(self._chat, answer, end.prompt_token_ids, end.choices, self._rendered)
            self._exact.turns.add(self._start.rollout.rollout_id, answered, self._start.call_id)

    async def _exact_prompt(self, request: Request) -> tuple[list[int], list[int]]:
        """The exact tokens of the request, and those that it is rendered as; raises AsText."""
        if not is_supported(self._chat):
            raise AsText("unsupported")
        turn = await self._exact.turns.earlier(self._start.rollout.rollout_id, self._chat)
        renderer, upstream, sent = self._exact.renderer, self._upstream, self._sent
        rendered = await renderer.tokens(upstream, request, request.sent_body())
        end = await renderer.closing(upstream, request, sent)
        prompt = undrifted_prompt(turn, rendered, end)
        if prompt is None:
            old = sent | {"messages": sent["messages"][: len(turn.messages) + 1], "add_generation_prompt": False}
            history = await renderer.tokens(upstream, request, encode(old))
            prompt = exact_prompt(turn, history, rendered, end)
        return prompt, rendered


@dataclass(slots=True)
class _Recent:
    """The part of a rollout that is kept in memory.

    `seen`: the answered calls that its turns are of, or came after. `parents`: the newest calls that were read, which
    later ones are stored against. `exchanges`: those of its Responses calls, which others refer to.
    """

    seen: set[str]
    turns: list[TokenTurn] = field(default_factory=list)
    parents: dict[str, Parent] = field(default_factory=dict)
    exchanges: dict[str, Exchange] = field(default_factory=dict)


class RecentTurns:
    """Keeps the recent turns of each rollout that has several. The store has all others."""

    def __init__(
        self, store: Store, chat_of: ChatOf, *, recent: int = 8, rollouts: int = 20_000, tokens: int = 2**24
    ) -> None:
        """At most `recent` turns of a rollout, `rollouts` rollouts and `tokens` tokens are kept in memory.

        `chat_of`: a recorded call's chat request.
        """
        self._store = store
        self._chat_of = chat_of
        self._rollouts: OrderedDict[str, _Recent] = OrderedDict()
        self._tokens = 0
        self._recent, self._max_rollouts, self._max_tokens = recent, rollouts, tokens

    async def earlier(self, rollout_id: str, chat: Json) -> TokenTurn:
        """Return the turn that a supported call continues, and mark it as the newest. Raise AsText if there is none."""
        known = await self.known(rollout_id, chat)
        if not is_last(known, chat):  # an edited history continues none, and is none of another worker's
            await self._read_others(rollout_id)
        turn = earlier_turn(known, chat)
        known[:] = [*(other for other in known if other is not turn), turn]
        return turn

    async def known(self, rollout_id: str, chat: Json) -> list[TokenTurn]:
        """Return the rollout's recent turns, newest last. Read the store only at the second turn: most have one."""
        if rollout_id not in self._rollouts and has_answers(chat):
            seen = await self._store.calls.answered(rollout_id, LATELY)
            recent = _Recent(seen)
            stored = await asyncio.to_thread(self._newest, await self._recorded(rollout_id), recent)
            if rollout_id not in self._rollouts:
                self._rollouts[rollout_id] = recent
                self._remember(rollout_id, stored)
        return self._rollouts[rollout_id].turns if rollout_id in self._rollouts else []

    def add(self, rollout_id: str, answered: Iterable[TokenTurn], call_id: str = "") -> None:
        """Note that a call was answered, if its rollout is in memory."""
        if rollout_id in self._rollouts:
            self._rollouts[rollout_id].seen.add(call_id)
            self._remember(rollout_id, answered)

    async def _read_others(self, rollout_id: str) -> None:
        """Read what other workers have answered since."""
        answered = await self._store.calls.answered(rollout_id, LATELY)
        if (recent := self._rollouts.get(rollout_id)) is None:
            return
        recent.seen &= answered
        if not (unseen := answered - recent.seen):
            return
        calls = await self._store.calls.some(unseen, recent.parents)
        calls = [call for call in calls if call.call_id not in recent.seen]
        recent.seen |= unseen
        stored = await asyncio.to_thread(self._newest, calls, recent)
        if self._rollouts.get(rollout_id) is recent:
            self._remember(rollout_id, stored)

    def forget(self, rollout_id: str) -> None:
        if (recent := self._rollouts.pop(rollout_id, None)) is not None:
            self._tokens -= sum(map(_size, recent.turns))

    async def _recorded(self, rollout_id: str) -> list[ModelCall]:
        try:
            return await self._store.calls.of(rollout_id)
        except NotFound:
            return []

    def _newest(self, calls: Sequence[ModelCall], recent: _Recent) -> list[TokenTurn]:
        """The newest turns of recorded calls, as many as are kept. A call of another API is made a chat first."""
        recent.exchanges |= by_response(call for call in calls if call.endpoint == "responses")
        found = deque[TokenTurn]()
        for call in reversed(calls):
            if len(found) < self._recent and call.status == "ok" and call.policy_version is not None:
                found.extendleft(reversed([*_turns(call, self._chat_of(call, recent.exchanges))]))
        recent.parents = newest_parents(recent.parents, calls)
        return [*found]

    def _remember(self, rollout_id: str, more: Iterable[TokenTurn]) -> None:
        known = self._rollouts[rollout_id].turns
        self._rollouts.move_to_end(rollout_id)
        for turn in more:
            known.append(_sharing(turn, known))
            self._tokens += _size(turn)
        while len(known) > self._recent:
            self._tokens -= _size(known.pop(0))
        while len(self._rollouts) > self._max_rollouts or (self._tokens > self._max_tokens and len(self._rollouts) > 1):
            self.forget(next(iter(self._rollouts)))


def _turns(call: ModelCall, chat: Json | None) -> Iterator[TokenTurn]:
    if chat is not None:
        yield from turns(chat, chat_answer(call.endpoint, call.response), call.prompt_token_ids, call.choices)


def _size(turn: TokenTurn) -> int:
    return len(turn.ids) + len(turn.rendered)


def _sharing(turn: TokenTurn, known: Sequence[TokenTurn]) -> TokenTurn:
    """The turn with the messages that it repeats taken from an earlier one: kept in memory once."""
    before = max((t.messages for t in known), key=lambda m: common_prefix(turn.messages, m), default=[])
    same = common_prefix(turn.messages, before)
    return replace(turn, messages=before[:same] + turn.messages[same:])


def _with_prompt(request: Request, prompt: list[int]) -> Request:
    """The same bytes with the tokens added, which vLLM takes instead of rendering the messages."""
    added = orjson.dumps({"kv_transfer_params": {"prompt_token_ids": prompt}})
    return request.with_members(added)
