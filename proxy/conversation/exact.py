"""Token continuity: a call that goes on with an earlier one goes to vLLM as that call's exact tokens and what is new.

Two routes of vLLM: `/v1/chat/completions/render` says which tokens messages become, and the ordinary
`/v1/chat/completions` takes a prompt as tokens in `kv_transfer_params.prompt_token_ids`, skipping its own rendering.
So the answer is vLLM's own in every respect, and nothing has to be put together here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from ..config.upstreams import UpstreamConfig
from ..errors import NotFound
from ..gateway.ports import Answer
from ..json_text import encode
from ..store.delta import common_prefix
from ..store.store import Store
from ..types import CallEnd, CallStart
from ..upstreams.attempts import Upstreams
from ..upstreams.http import Request
from .renderer import Renderer
from .turns import (
    AsText,
    Outcome,
    Turn,
    earlier_turn,
    exact_prompt,
    has_answers,
    is_last,
    is_supported,
    turns,
    undrifted_prompt,
)

log = logging.getLogger(__name__)
Json = dict[str, Any]

ENDPOINT = "chat/completions"
IGNORED = (
    "upstream %s does not take prompts as tokens: vLLM 0.32 or newer does; use it, or policy.token_continuity: text"
)


class ExactTokens:
    """Remembers the recent turns of each rollout that has several; what it does not remember, the store does."""

    def __init__(
        self,
        upstreams: Upstreams,
        store: Store,
        count: Callable[[Outcome], None],
        *,
        recent: int = 8,
        rollouts: int = 20_000,
        tokens: int = 2**24,
    ) -> None:
        self._upstreams = upstreams
        self._store = store
        self._count = count
        self._turns: OrderedDict[str, list[Turn]] = OrderedDict()
        self._tokens = 0
        self._recent, self._max_rollouts, self._max_tokens = recent, rollouts, tokens
        self._renderer = Renderer(upstreams)
        self._warned = False

    def call(self, upstream: UpstreamConfig, start: CallStart, sent: Json) -> ExactCall | None:
        """A call that may go on with an earlier one; None for one that is no chat, or not with the policy."""
        if start.policy_version is None or upstream.kind != "vllm":
            return None
        if start.endpoint != ENDPOINT:
            self._count("unsupported")
            return None
        return ExactCall(self, upstream, start, sent)

    def forget(self, rollout_id: str) -> None:
        """The rollout was deleted."""
        for turn in self._turns.pop(rollout_id, ()):
            self._tokens -= _size(turn)

    # For ExactCall ---------------------------------------------------------------------------------------------

    async def open(self, upstream: UpstreamConfig, request: Request) -> Answer:
        return await self._upstreams.open(upstream, request)

    async def earlier_turn(self, start: CallStart) -> Turn:
        """The turn that a supported call goes on with, kept as the newest: others may branch off. Raises AsText."""
        known = await self.known(start)
        if not is_last(known, start.request):  # another worker answered the ones since, or all of them
            self.forget(start.rollout.rollout_id)
            known = await self.known(start)
        turn = earlier_turn(known, start.request)
        known[:] = [*(other for other in known if other is not turn), turn]
        return turn

    async def known(self, start: CallStart) -> list[Turn]:
        """The rollout's recent turns, newest last. Read from the store at its second turn: most have one only."""
        rollout_id = start.rollout.rollout_id
        if rollout_id not in self._turns and has_answers(start.request):
            stored = await self._stored(rollout_id)
            if rollout_id not in self._turns:
                self._turns[rollout_id] = []
                self._remember(rollout_id, stored)
        return self._turns.get(rollout_id, [])

    def ended(self, start: CallStart, end: CallEnd, outcome: Outcome, rendered: Sequence[int]) -> None:
        self._count(outcome)
        if end.status == "ok" and start.rollout.rollout_id in self._turns:
            found = turns(start.request, end.response, end.prompt_token_ids, end.choices, rendered)
            self._remember(start.rollout.rollout_id, found)

    async def prompt(
        self, upstream: UpstreamConfig, request: Request, sent: Json, turn: Turn
    ) -> tuple[list[int], list[int]]:
        """The exact tokens of a request that goes on with the turn, and those that it is rendered as; raises AsText."""
        whole = await self._renderer.tokens(upstream, request, request.body)
        end = await self._renderer.closing(upstream, request, sent)
        prompt = undrifted_prompt(turn, whole, end)
        if prompt is None:
            told = sent | {"messages": sent["messages"][: len(turn.messages) + 1], "add_generation_prompt": False}
            history = await self._renderer.tokens(upstream, request, encode(told))
            prompt = exact_prompt(turn, history, whole, end)
        return prompt, whole

    def warn_ignored(self, upstream: UpstreamConfig) -> None:
        """Once in the life of the proxy: every call would say it."""
        if not self._warned:
            self._warned = True
            log.warning(IGNORED, upstream.name)

    async def _stored(self, rollout_id: str) -> list[Turn]:
        try:
            calls = await self._store.calls.of(rollout_id)
        except NotFound:
            return []
        answered = (c for c in calls if c.endpoint == ENDPOINT and c.status == "ok" and c.policy_version is not None)
        return [t for c in answered for t in turns(c.request, c.response, c.prompt_token_ids, c.choices)]

    def _remember(self, rollout_id: str, more: Iterable[Turn]) -> None:
        known = self._turns[rollout_id]
        self._turns.move_to_end(rollout_id)
        for turn in more:
            known.append(_sharing(turn, known))
            self._tokens += _size(turn)
        while len(known) > self._recent:
            self._tokens -= _size(known.pop(0))
        while len(self._turns) > self._max_rollouts or (self._tokens > self._max_tokens and len(self._turns) > 1):
            self.forget(next(iter(self._turns)))


class ExactCall:
    """One call: `open` sends it, exactly if that is possible; `ended` is told how it went."""

    def __init__(self, continuity: ExactTokens, upstream: UpstreamConfig, start: CallStart, sent: Json) -> None:
        self._continuity = continuity
        self._upstream = upstream
        self._start = start
        self._sent = sent
        self._prompt: tuple[int, ...] = ()
        self._whole: list[int] = []
        self._outcome: Outcome | None = None

    async def open(self, request: Request) -> Answer:
        """The upstream's answer to `sent`, as `Upstreams.open` gives it; a second try goes as text."""
        if self._outcome is not None:
            return await self._continuity.open(self._upstream, request)
        try:
            prompt, whole = await self._exact_prompt(request)
            answer = await self._continuity.open(self._upstream, _with_prompt(request, prompt))
            if answer.status in (400, 422):  # whatever is wrong, the agent shall see vLLM's answer to its own request
                answer.release()
                raise AsText("refused")
            self._outcome, self._prompt, self._whole = "exact", tuple(prompt), whole
            return answer
        except AsText as reason:
            self._outcome = reason.outcome
        if self._outcome != "first":
            log.info("call %s goes as text: %s", self._start.call_id, self._outcome)
        return await self._continuity.open(self._upstream, request)

    def ended(self, end: CallEnd) -> None:
        """The call's record is committed."""
        if self._outcome is None or end.fallback is not None:  # it never got as far as the upstream, or not only there
            return
        if self._prompt and end.status == "ok" and end.prompt_token_ids != self._prompt:
            self._outcome = "ignored"
            self._continuity.warn_ignored(self._upstream)
        self._continuity.ended(self._start, end, self._outcome, self._whole)

    async def _exact_prompt(self, request: Request) -> tuple[list[int], list[int]]:
        if not is_supported(self._start.request):
            raise AsText("unsupported")
        turn = await self._continuity.earlier_turn(self._start)
        return await self._continuity.prompt(self._upstream, request, self._sent, turn)


def _size(turn: Turn) -> int:
    return len(turn.ids) + len(turn.rendered)


def _sharing(turn: Turn, known: Sequence[Turn]) -> Turn:
    """The turn with the messages that it repeats taken from an earlier one: kept in memory once."""
    before = max((t.messages for t in known), key=lambda m: common_prefix(turn.messages, m), default=[])
    same = common_prefix(turn.messages, before)
    return replace(turn, messages=before[:same] + turn.messages[same:])


def _with_prompt(request: Request, prompt: list[int]) -> Request:
    """The same bytes with the tokens added: what they say of the messages is then not rendered."""
    added = orjson.dumps({"kv_transfer_params": {"prompt_token_ids": prompt}})
    return request.with_body(request.body.rstrip()[:-1] + b"," + added[1:])
