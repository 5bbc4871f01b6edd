"""Sends a call that continues an earlier one as that call's exact tokens plus the new ones.

Text does not show its sampled tokens: rendered and tokenised again, an answer may become other tokens.
So the next prompt is the earlier call's tokens as they were, and after them only what is new:

    earlier prompt · earlier answer, as sampled · what the template puts after an answer · new messages, rendered

Two routes of vLLM: `/v1/chat/completions/render` says which tokens messages become, and the ordinary
`/v1/chat/completions` takes a prompt as tokens in `kv_transfer_params.prompt_token_ids`, skipping its own rendering.
So the answer is vLLM's own in every respect, and nothing has to be put together here.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from ...core.config.upstreams import UpstreamConfig
from ...core.errors import LightningError, NotFound
from ...core.json_text import dumps, encode
from ...core.records import CallEnd, CallStart, Choice, ModelCall
from ...core.tools import dicts
from ...core.values import as_read
from ...store.requests import Parent, common_prefix, newest_parents
from ...store.store import Store
from ..dialects.as_chat.dialect import CHAT_ENDPOINT, chat_answer
from ..dialects.earlier import LATELY, Exchange, by_response
from .attempts import Upstreams
from .upstream import Answer, Request

log = logging.getLogger(__name__)
Json = dict[str, Any]
# A recorded call as a chat request, given its rollout's exchanges by response; None if it is not one.
ChatOf = Callable[[ModelCall, Mapping[str, Exchange]], Json | None]

IGNORED = (
    "upstream %s does not take prompts as tokens: vLLM 0.32 or newer does; use it, or policy.token_continuity: text"
)

# first: there is no earlier call to continue. All that follow are sent as text, because
# edited: the history is not the earlier messages and answers;
# changed: its tools, or other things that a template reads, are new;
# template: it renders earlier turns differently later, or its text after an answer is not clear;
# unsupported: vLLM takes no tokens with such a request;
# refused: vLLM answered an error; ignored: it took other tokens; unavailable: it has no render route.
Outcome = Literal["exact", "first", "edited", "changed", "template", "unsupported", "refused", "ignored", "unavailable"]

# What a request may change from turn to turn without another prompt for the same messages.
# fmt: off
_SAMPLING = frozenset({
    "messages", "model", "n", "seed", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "max_tokens",
    "max_completion_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "logprobs", "top_logprobs", "stream", "stream_options", "return_token_ids", "response_format", "structured_outputs",
    "parallel_tool_calls", "tool_choice", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "request_id", "session_id", "priority", "ignore_eos", "bad_words",
    "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "return_tokens_as_token_ids", "cache_salt", "vllm_xargs",
})
_UNSUPPORTED = frozenset({
    "kv_transfer_params", "ec_transfer_params", "echo", "continue_final_message", "truncate_prompt_tokens",
    "prompt_logprobs", "use_beam_search", "return_prompt_text", "chat_template",
})
# fmt: on
CLOSINGS = 1000  # ways to render, at most
RENDER = "/v1/chat/completions/render"
NO_ROUTE = (
    f"upstream %s has no {RENDER}: start it with `lightning-proxy vllm`, or add --enable-scale-out; until then calls "
    "go as text, and a rollout may become several training rows"
)


class AsText(Exception):
    """Signals that the call goes as text; `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class ExactTokens:
    """Sends calls of the policy as exact tokens where that is possible."""

    def __init__(self, upstreams: Upstreams, turns: RecentTurns, count: Callable[[Outcome], None]) -> None:
        """`count` is called with the outcome of each call."""
        self.upstreams = upstreams
        self.turns = turns
        self.count = count
        self._closings: dict[str, list[int]] = {}
        self._warned: set[tuple[str, str]] = set()

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

    def warn(self, text: str, upstream: UpstreamConfig) -> None:
        """Log a warning once in the life of the proxy, because every call would repeat it."""
        if (text, upstream.name) not in self._warned:
            self._warned.add((text, upstream.name))
            log.warning(text, upstream.name)

    async def rendered(self, upstream: UpstreamConfig, request: Request, body: bytes) -> list[int]:
        """Return the tokens that vLLM makes of the messages of a chat request's body; raise AsText.

        The server that answers the call is asked, because its template may differ from the model's own. `request`: a
        request of the agent's, for its credentials.
        """
        render_request = request._replace(path=RENDER, query=b"", sent=None).with_body(body)
        try:
            answer = await self.upstreams.open(upstream, render_request)
            try:
                raw = await answer.read()
            finally:
                answer.release()
        except LightningError:
            raise AsText("refused") from None  # the call itself will meet it too, and say so
        if answer.status in (403, 404, 405, 501):
            self.warn(NO_ROUTE, upstream)
            raise AsText("unavailable")
        try:
            ids = orjson.loads(raw)["token_ids"]
        except (orjson.JSONDecodeError, TypeError, KeyError):
            raise AsText("refused") from None
        if not ids or not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise AsText("refused")
        return ids

    async def closing(self, upstream: UpstreamConfig, request: Request, sent: Json) -> list[int]:
        """Return the tokens that the template puts after an answer. Ask once per way to render; raise AsText."""
        options = {"chat_template_kwargs": sent.get("chat_template_kwargs")}
        key = f"{upstream.name} {dumps(options)}"
        if key not in self._closings:
            if len(self._closings) >= CLOSINGS:
                self._closings.clear()
            options |= {"model": sent.get("model"), "add_generation_prompt": False}
            asked = {"role": "user", "content": "0"}
            bodies = (
                encode(options | {"messages": [asked, {"role": "assistant", "content": text}]}) for text in ("0", "1")
            )
            ends = await asyncio.gather(*(self.rendered(upstream, request, body) for body in bodies))
            self._closings[key] = closing(*ends)
        return self._closings[key]


@dataclass(slots=True)
class ExactCall:
    """One call. `open` sends it, as exact tokens if possible; `ended` takes its outcome."""

    exact: ExactTokens
    upstream: UpstreamConfig
    start: CallStart
    sent: Json
    chat: Json
    prompt: tuple[int, ...] = ()
    rendered: Sequence[int] = ()
    outcome: Outcome | None = None

    async def open(self, request: Request) -> Answer:
        """Return the upstream's answer to `sent`, like `Upstreams.open`. A second try goes as text."""
        open_upstream = self.exact.upstreams.open
        if self.outcome is not None:
            return await open_upstream(self.upstream, request)
        try:
            prompt = await self._exact_prompt(request)
            added = orjson.dumps({"kv_transfer_params": {"prompt_token_ids": prompt}})  # instead of rendering
            answer = await open_upstream(self.upstream, request.with_members(added))
            if answer.status in (400, 422):  # whatever is wrong, the agent shall see vLLM's answer to its own request
                answer.release()
                raise AsText("refused")
            self.outcome, self.prompt = "exact", tuple(prompt)
            return answer
        except AsText as reason:
            self.outcome, self.rendered = reason.outcome, ()
        if self.outcome != "first":
            log.info("call %s goes as text: %s", self.start.call_id, self.outcome)
        return await open_upstream(self.upstream, request)

    def ended(self, end: CallEnd) -> None:
        """Note that the call's record is committed."""
        if self.outcome is None or end.fallback is not None:  # it did not reach the upstream, or another answered
            return
        if self.prompt and end.status == "ok" and end.prompt_token_ids != self.prompt:
            self.outcome = "ignored"
            self.exact.warn(IGNORED, self.upstream)
        self.exact.count(self.outcome)
        if end.status == "ok":
            answer = chat_answer(self.start.endpoint, end.response)
            answered = turns(self.chat, answer, end.prompt_token_ids, end.choices, self.rendered)
            self.exact.turns.add(self.start.rollout.rollout_id, answered, self.start.call_id)

    async def _exact_prompt(self, request: Request) -> list[int]:
        """The exact tokens of the request; raises AsText."""
        if not is_supported(self.chat):
            raise AsText("unsupported")
        turn = await self.exact.turns.earlier(self.start.rollout.rollout_id, self.chat)
        exact, upstream, sent = self.exact, self.upstream, self.sent
        rendered = self.rendered = await exact.rendered(upstream, request, request.sent_body())
        end = await exact.closing(upstream, request, sent)
        prompt = exact_prompt(turn, as_sampled(turn, end), rendered, end)
        if prompt is None:
            old = sent | {"messages": sent["messages"][: len(turn.messages) + 1], "add_generation_prompt": False}
            history = await exact.rendered(upstream, request, encode(old))
            prompt = exact_prompt(turn, history, rendered, end)
        if prompt is None:
            raise AsText("template")
        return prompt


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """An answered call, as messages and as tokens.

    `ids`: its prompt, then its answer, which is the last `sampled` of them, with the end of turn if that was sampled.
    `rendered`: its messages with the generation prompt, as vLLM renders them: the prompt, unless that was made here.
    `shape`: what of its request a template reads besides the messages.
    """

    messages: list[Any]
    shape: Json
    answer: Json
    ids: array[int]
    sampled: int
    finish_reason: str | None
    rendered: array[int]

    @property
    def sampled_ids(self) -> list[int]:
        return self.ids[len(self.ids) - self.sampled :].tolist()

    @property
    def size(self) -> int:
        return len(self.ids) + len(self.rendered)


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
        self._calls = store.calls
        self._chat_of = chat_of
        self._rollouts: OrderedDict[str, _Recent] = OrderedDict()
        self._tokens = 0
        self._recent, self._max_rollouts, self._max_tokens = recent, rollouts, tokens

    async def earlier(self, rollout_id: str, chat: Json) -> TokenTurn:
        """Return the turn that a supported call continues, and mark it as the newest. Raise AsText if there is none.

        The store is read where the request's last answer is not in memory: most rollouts have one turn.
        """
        messages = chat["messages"]
        answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            raise AsText("first")
        recent = self._rollouts.get(rollout_id)
        turn = continued(recent.turns, messages) if recent else None
        if recent is None or turn is None or len(turn.messages) < answers[-1]:
            recent = await self._read(rollout_id)
            turn = continued(recent.turns, messages)
        if turn is None:
            raise AsText("edited" if recent.turns else "first")
        if turn.shape != shape(chat):
            raise AsText("changed")
        recent.turns[:] = [*(other for other in recent.turns if other is not turn), turn]
        return turn

    def add(self, rollout_id: str, answered: Iterable[TokenTurn], call_id: str = "") -> None:
        """Note that a call was answered, if its rollout is in memory."""
        if rollout_id in self._rollouts:
            self._rollouts[rollout_id].seen.add(call_id)
            self._remember(rollout_id, answered)

    def forget(self, rollout_id: str) -> None:
        """Drop all memory of a rollout, which was deleted or is the one that was quiet the longest."""
        if (recent := self._rollouts.pop(rollout_id, None)) is not None:
            self._tokens -= sum(turn.size for turn in recent.turns)

    async def _read(self, rollout_id: str) -> _Recent:
        """Read the rollout, or if it is in memory what other workers have answered since."""
        recent, read = self._rollouts.get(rollout_id), list[ModelCall]()
        answered = await self._calls.answered(rollout_id, LATELY)
        if recent is None:
            recent = _Recent(answered)
            with suppress(NotFound):
                read = await self._calls.of(rollout_id)
            new = await asyncio.to_thread(self._newest, read, recent)
            self._rollouts.setdefault(rollout_id, recent)
        else:
            recent.seen &= answered
            if unseen := answered - recent.seen:
                read = await self._calls.some(unseen, recent.parents)
                read = [call for call in read if call.call_id not in recent.seen]
                recent.seen |= unseen
            new = await asyncio.to_thread(self._newest, read, recent) if read else []
        if self._rollouts.get(rollout_id) is recent:
            self._remember(rollout_id, new)
        return self._rollouts.get(rollout_id, recent)

    def _newest(self, calls: Sequence[ModelCall], recent: _Recent) -> list[TokenTurn]:
        """The newest turns of recorded calls, as many as are kept. A call of another API is made a chat first."""
        recent.exchanges |= by_response(call for call in calls if call.endpoint == "responses")
        recent.parents = newest_parents(recent.parents, calls)
        found: list[TokenTurn] = []
        for call in reversed(calls):
            is_wanted = len(found) < self._recent and call.status == "ok" and call.policy_version is not None
            if is_wanted and (chat := self._chat_of(call, recent.exchanges)) is not None:
                answer = chat_answer(call.endpoint, call.response)
                found = [*turns(chat, answer, call.prompt_token_ids, call.choices), *found]
        return found

    def _remember(self, rollout_id: str, more: Iterable[TokenTurn]) -> None:
        """Keep more turns. Messages that one repeats are taken from an earlier one: they are in memory once."""
        known = self._rollouts[rollout_id].turns
        self._rollouts.move_to_end(rollout_id)
        for turn in more:
            before = max((t.messages for t in known), key=lambda m: common_prefix(turn.messages, m), default=[])
            same = common_prefix(turn.messages, before)
            known.append(replace(turn, messages=before[:same] + turn.messages[same:]))
            self._tokens += turn.size
        while len(known) > self._recent:
            self._tokens -= known.pop(0).size
        while len(self._rollouts) > self._max_rollouts or (self._tokens > self._max_tokens and len(self._rollouts) > 1):
            self.forget(next(iter(self._rollouts)))


def turns(
    request: Json, response: Any, prompt: Sequence[int], choices: Sequence[Choice], rendered: Sequence[int] = ()
) -> Iterator[TokenTurn]:
    """Return one turn per answer of a call with known tokens. `rendered`: as in TokenTurn, or empty."""
    messages = request.get("messages")
    by_index = {choice.index: choice for choice in choices}
    for answered in dicts(response.get("choices")) if isinstance(response, dict) else ():
        choice, message = by_index.get(answered.get("index", 0)), answered.get("message")
        if prompt and choice and choice.token_ids and isinstance(message, dict) and isinstance(messages, list):
            ids = array("i", [*prompt, *choice.token_ids])
            shown = array("i", rendered or prompt)
            yield TokenTurn(messages, shape(request), message, ids, len(choice.token_ids), choice.finish_reason, shown)


def shape(request: Json) -> Json:
    """Return the parts of a request, besides the messages, that a template may read."""
    read = {name: value for name, value in request.items() if name not in _SAMPLING and value is not None}
    # An option of vLLM leaves the tools out of such a prompt.
    return read | ({"tool_choice": "none"} if request.get("tool_choice") == "none" else {})


def is_supported(request: Json) -> bool:
    """Return whether vLLM takes token prompts for this request and gives one answer to continue."""
    request = as_read(request)
    messages = request.get("messages")
    if not isinstance(messages, list) or any(request.get(name) for name in _UNSUPPORTED):
        return False
    if request.get("n") not in (None, 1) or request.get("add_generation_prompt") is False:
        return False
    return all(isinstance(message, dict) and _is_text(message.get("content")) for message in messages)


def _is_text(content: Any) -> bool:
    return not isinstance(content, list) or all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content
    )


def continued(known: Sequence[TokenTurn], messages: list[Any]) -> TokenTurn | None:
    """Return the longest of the known turns (newest last) that messages continue; of equal ones the newest."""
    same = [turn for turn in known if _continues(messages, turn)]
    return max(reversed(same), key=lambda turn: len(turn.messages), default=None)


def _continues(messages: list[Any], turn: TokenTurn) -> bool:
    old = len(turn.messages)
    if len(messages) <= old + 1:  # with nothing after the answer the model is to write on itself
        return False
    pairs = zip(messages, turn.messages, strict=False)
    same = messages[:old] == turn.messages or all(_said(sent) == _said(kept) for sent, kept in pairs)
    return same and _is_answer(messages[old], turn.answer)


def _is_answer(sent: Any, answer: Json) -> bool:
    """Whether a message is the answer as the agent got it; clients drop reasoning, and count tool calls anew."""
    sent, answer = _said(sent), _said(answer)
    if "reasoning" not in sent:
        answer.pop("reasoning", None)
    for message in (sent, answer):
        content = message.get("content") or ""
        if isinstance(content, list) and all(isinstance(part.get("text"), str) for part in dicts(content)):
            content = "".join(part["text"] for part in dicts(content))
        message["content"] = content
        message["tool_calls"] = [_called(call) for call in dicts(message.get("tool_calls"))]
    return bool(sent == answer)


def _said(message: Any) -> Json:
    """A message without empty fields, which clients may drop when they send it again."""
    if not isinstance(message, dict):
        return {}
    kept = {name: value for name, value in message.items() if value not in (None, "", [])}
    if "reasoning_content" in kept:
        kept["reasoning"] = kept.pop("reasoning_content")
    return kept


def _called(call: Json) -> tuple[Any, Any]:
    """The name and the arguments of a tool call, however their JSON is written."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    with suppress(orjson.JSONDecodeError):
        arguments = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    return function.get("name"), arguments


def closing(one: list[int], other: list[int]) -> list[int]:
    """Return the tokens that a template puts after an answer: the common end of renderings with different answers."""
    return one[len(one) - common_prefix(one[::-1], other[::-1]) :]


def as_sampled(turn: TokenTurn, closing: list[int]) -> list[int]:
    """Return the rendering of the turn with its answer, if that becomes the tokens that were sampled."""
    answer = turn.sampled_ids
    return [*turn.rendered, *answer[: len(answer) - _sampled_with(turn, closing)], *closing]


def exact_prompt(turn: TokenTurn, history: list[int], rendered: list[int], closing: list[int]) -> list[int] | None:
    """Return the tokens to send; None if the template mixes the new part with the old one.

    `history`: the turn's messages and its answer, rendered; `rendered`: the request's with the generation prompt.
    """
    end = len(history) - len(closing)
    if rendered[: len(history)] != history or history[end:] != closing:
        return None
    follows = rendered[end:]
    return [*turn.ids, *follows[_sampled_with(turn, follows[: max(len(closing), 1)]) :]]


def _sampled_with(turn: TokenTurn, follows: list[int]) -> int:
    """How many of the tokens after an answer were sampled with it: its end of turn. One that was cut short has none."""
    answer = [] if turn.finish_reason == "length" else turn.sampled_ids
    return next((n for n in range(min(len(answer), len(follows)), 0, -1) if answer[-n:] == follows[:n]), 0)
