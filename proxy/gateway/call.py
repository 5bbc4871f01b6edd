"""Handles one model call, from its request to the answer's last byte. Start at `Gateway.answer`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ...core.config.root import Config
from ...core.errors import LightningError, StoreUnavailable, UpstreamTimeout, UpstreamUnreachable
from ...core.http import LARGE, in_thread_if_large
from ...core.records import CallEnd, CallStart, CallStatus, Header, RolloutName
from ...core.tokens import NO_TOKEN_IDS, NOT_THE_POLICY, ONLY_RECORDED, Tokens
from ...core.tools import tool_calls
from ...core.values import as_read, is_under_way
from ..access.auth import credentials
from ..access.limits import Limiter
from ..dialects.atoms import parsed
from ..dialects.stream import LARGE_ANSWER, BufferedTranscript, Dialect, Transcript
from .asgi import Reply
from .attempts import Attempts, Upstreams
from .exact import ExactTokens
from .metrics import Metrics
from .recorder import Recorder, Statement
from .routing import PolicyRouter
from .through_chat import ChatDecision, ChatRoute
from .unnamed import Conversation, UnnamedRollouts, end_statements, start_statements
from .upstream import Answer, Request, Route

log = logging.getLogger(__name__)

_CLAUDE_SESSION, _CLAUDE_AGENT = "x-claude-code-session-id", "x-claude-code-agent-id"
_CLAUDE_PARENT = "x-claude-code-parent-agent-id"
_CODEX_KIND, _CODEX_TURN = "x-openai-subagent", "x-codex-turn-metadata"
_HARNESS = frozenset([_CLAUDE_SESSION, _CLAUDE_AGENT, _CODEX_KIND, _CODEX_TURN])
_LONGEST = 200  # characters of what a harness says that are kept
AT_ONCE_S = 0.1  # then the agent gets the part of a non-streamed answer that has arrived


def model_of(body: dict[str, Any]) -> str | None:
    """Return the model that a body names; None if there is none or it is not a string."""
    model = body.get("model")
    return model if isinstance(model, str) else None


def harness_of(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the context that Claude Code or Codex gives in headers, for `ModelCall.harness`; None if there is none.

    Claude Code gives each sub-agent an id; the main agent has the session's id. Codex gives each agent a thread id.
    """
    if _HARNESS.isdisjoint(headers):
        return None
    session, agent, kind = (headers.get(name, "") for name in (_CLAUDE_SESSION, _CLAUDE_AGENT, _CODEX_KIND))
    turn = parsed(headers.get(_CODEX_TURN, ""))
    thread, parent = map(turn.get, ("thread_id", "parent_thread_id")) if isinstance(turn, dict) else (None, None)
    if agent:
        thread, parent = agent, headers.get(_CLAUDE_PARENT) or session
    elif kind not in ("", "compact") and thread is None:
        thread, parent = kind, ""
    said = {"thread": thread or session or None, "parent": parent, "kind": kind or None}
    return {name: str(value)[:_LONGEST] for name, value in said.items() if value is not None}


class Question(NamedTuple):
    """A request for a model's answer. `body`: its JSON. `name`: its rollout, a new one if the request names none.

    `also` returns statements to commit together with the call's start.
    """

    request: Request
    body: dict[str, Any]
    headers: Mapping[str, str]
    dialect: Dialect
    name: RolloutName
    limiter: Limiter | None
    recorded: bool
    also: Callable[[CallStart], Sequence[Statement]] | None = None

    @property
    def endpoint(self) -> str:
        """Return the name of the API in records."""
        return self.request.path.removeprefix("/v1/")

    @property
    def is_retry(self) -> bool:
        """Return whether the agent's client sent this request again by itself: OpenAI's clients count such retries."""
        return self.headers.get("x-stainless-retry-count", "0") != "0"


# Returns the question to show the model and to record, in place of the agent's own, in this rollout.
Rewrite = Callable[[Question, RolloutName], Awaitable[Question]]


# Is called with every recorded call once its end is durable; the headers are the request's, their names in lower case.
OnCall = Callable[[CallStart, CallEnd, Mapping[str, str]], None]


@dataclass(eq=False)
class Gateway:
    """Answers model calls. It holds the state that calls share; the state of a single call is in `CallUnderWay`.

    Without `unnamed`, each unnamed call is a new rollout. Without `exact`, all prompts are sent as text. Without
    `chat_route`, each call goes to its API's own route. `rewrites` change the question. With the default settings, a
    chat call has no `exact`, no `chat` in its ChatDecision, no redactor in the recorder and no `choose` in the router.
    """

    config: Config
    policy: PolicyRouter
    upstreams: Upstreams
    recorder: Recorder
    metrics: Metrics
    unnamed: UnnamedRollouts | None = None
    exact: ExactTokens | None = None
    chat_route: ChatRoute | None = None
    rewrites: Sequence[Rewrite] = ()
    listeners: Sequence[OnCall] = ()

    @property
    def finish_s(self) -> float:
        """Return for how many seconds an answer is still read for the record after its agent has left."""
        recording = self.config.recording
        return recording.finish_timeout_s if recording.on_disconnect == "finish" else 0.0

    async def answer(self, question: Question, reply: Reply) -> None:
        """Answer a call. If it is recorded, its record is durable before the answer's last byte leaves."""
        rollout, conversation = await self._rollout(question)
        # Which weights answer. Without a route to them the call fails before a plugin sees it.
        route = await self.policy.route(rollout, model_of(question.body), recorded=question.recorded)
        for rewrite in self.rewrites:  # the model, and so the record, gets the request as plugins rewrite it
            question = await rewrite(question, rollout)
        decision = ChatDecision()  # to the API's own route, or the chat route
        if self.chat_route is not None and question.recorded and question.endpoint in self.chat_route.translators:
            decision = await self.chat_route.decide(
                question.endpoint, question.request, question.body, rollout.rollout_id, route
            )
        call = CallUnderWay(self, question, rollout, route, decision, reply, conversation)
        # A failure above this line is not recorded: nothing has been sent upstream yet.
        with reply.while_connected(finish_s=self.finish_s if question.recorded else 0.0):
            try:
                await call.record_start()
                # Entering `attempts` sends the request, with retries and fallbacks, as exact tokens where possible.
                async with asyncio.timeout(route.upstream.total_timeout_s) as limit, call.attempts as answer:
                    await call.pass_on(answer)
                    limit.reschedule(None)  # the rest does not wait for the upstream: the commit, and a slow agent
                    await call.record_end()
                    await call.pass_on_the_rest(answer)
            except BaseException as error:  # a call whose start is durable gets an end, whatever happens
                await call.failed(error)
                if not isinstance(error, Exception):
                    raise

    async def _rollout(self, question: Question) -> tuple[RolloutName, Conversation | None]:
        """The rollout that the request names, continues or begins; and its conversation if that was looked up."""
        name = question.name
        if self.unnamed is None or name.named or not question.recorded:
            return name, None
        size = len(question.request.body)
        made = partial(Conversation, credentials(question.headers), name, question.body, size)
        conversation = await in_thread_if_large(size, made)
        rollout_id = await self.unnamed.find(conversation, is_retry=question.is_retry)
        return name if rollout_id is None else name._replace(rollout_id=rollout_id), conversation

    def ended(
        self,
        start: CallStart,
        end: CallEnd,
        headers: Mapping[str, str],
        limiter: Limiter | None,
        size: int = 0,
        *,
        recorded: bool = True,
    ) -> None:
        """Count a call towards its limits. Unless it is `incomplete`, also count it in metrics and tell listeners."""
        if limiter is not None:
            limiter.spend(end, size)
        if end.status == "incomplete":  # a background response, which ends later
            return
        self.metrics.call_ended(end, recorded)
        for listener in self.listeners if recorded else ():
            listener(start, end, headers)


@dataclass(eq=False)
class CallUnderWay:
    """One call under way. Once its start is durable, it gets one end: ok, error or cancelled.

    It stays `incomplete` only if the store fails, the process is killed, or its response goes on in the background.
    Without `conversation`, later requests that name no rollout cannot find this call.
    """

    gateway: Gateway
    question: Question
    rollout: RolloutName
    route: Route
    decision: ChatDecision
    reply: Reply
    conversation: Conversation | None
    _ttft_ms: float | None = None
    _http_status: int | None = None
    _transcript: Transcript | BufferedTranscript | None = None
    _committed: asyncio.Future[None] | None = None  # the call's end

    def __post_init__(self) -> None:
        gateway, question, route, chat = self.gateway, self.question, self.route, self.decision.chat
        request = question.request._replace(rollout_id=self.rollout.rollout_id)
        self.attempts = Attempts(gateway.upstreams, route, request, question.body, question.dialect, chat)
        self._start = CallStart(
            call_id=f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}",  # ids sort by time
            rollout=self.rollout,
            endpoint=question.endpoint,
            model=model_of(self.attempts.target.sent),
            policy_version=route.version,
            request=question.body,
            started_at=time.time(),
            is_retry=question.is_retry,
            request_text=question.request.body,
            upstream=route.upstream.name,
            pins=route.pins,
            harness=harness_of(question.headers),
        )
        exact = gateway.exact if question.recorded else None
        self._exact = exact and exact.call(
            route.upstream, self._start, self.attempts.target.sent, chat.request if chat else None
        )
        if self._exact:
            self.attempts.open_first = self._exact.open
        self._began = time.perf_counter()

    @property
    def upstream(self) -> str:
        """Return how errors name the upstream that is being called or that answered."""
        return f"upstream {self.attempts.upstream.name}"

    async def record_start(self) -> None:
        """Record the start of the call, if it is to be recorded, and return once the start is durable."""
        if self.question.recorded:
            question, known = self.question, self.conversation
            also = [] if known is None else start_statements(self._start, known)
            if question.also is not None:
                also += question.also(self._start)
            await self.gateway.recorder.start(self._start, also)

    async def pass_on(self, answer: Answer) -> None:
        """Send the answer as it arrives, but hold back a stream's last event, or the last bytes of any other answer.

        Raise UpstreamUnreachable if a stream ends before its last event.
        """
        reply, self._http_status = self.reply, answer.status
        if answer.is_stream:  # the first event may take long
            await reply.start(answer.status, self._head(answer))
        await answer.sniff(wants_stream=bool(as_read(self.question.body).get("stream")))
        if not answer.is_stream:
            await self._pass_on_whole(answer)
            return
        transcript = self._transcript = self._dialect.stream(self.attempts.target.injection)
        if not reply.started:  # only its first bytes tell
            await reply.start(answer.status, self._head(answer))
        while not transcript.ended and (piece := await answer.piece()):
            if self._ttft_ms is None:
                self._ttft_ms = self._elapsed_ms()
            await reply.body(transcript.feed(piece))
        if not transcript.ended:
            await reply.body(transcript.end())
        if not transcript.may_end:
            raise UpstreamUnreachable(f"{self.upstream}: the stream ended before its last event")

    async def _pass_on_whole(self, answer: Answer) -> None:
        """Pass on an answer that is not a stream. If it is complete within `AT_ONCE_S`, nothing is sent yet."""
        target, reply, showing = self.attempts.target, self.reply, list[asyncio.Task[None]]()
        transcript = self._transcript = BufferedTranscript(
            self._dialect, target.injection, answer.status, translated=target.translated
        )

        async def show() -> None:
            if not reply.started:
                await reply.start(answer.status, self._head(answer, keep_length=not transcript.rewrites))
            transcript.shown = True
            await reply.body(transcript.feed(b""))

        loop = asyncio.get_running_loop()
        late = loop.call_later(AT_ONCE_S, lambda: showing.append(loop.create_task(show())))
        try:
            while piece := await answer.piece():
                sent = transcript.feed(piece)
                for shown in showing:
                    await shown
                    await reply.body(sent)
        finally:
            late.cancel()
            for shown in showing:
                await shown
        if transcript.size < LARGE_ANSWER:
            transcript.end()
        else:
            await asyncio.to_thread(transcript.end)

    async def pass_on_the_rest(self, answer: Answer) -> None:
        """Send what was held back, and what the upstream sends after its last event."""
        reply, transcript = self.reply, self._transcript
        assert transcript is not None
        data = transcript.held
        if not reply.started:
            await reply.send(answer.status, self._head(answer), data)
            return
        while not answer.at_end:
            await reply.body(data)
            if not (data := await answer.piece()):
                break
        await reply.body(data, more=False)

    @property
    def _dialect(self) -> Dialect:
        """The dialect of the current answer."""
        chat = self.decision.chat
        return chat if chat and self.attempts.target.translated else self.question.dialect

    async def record_end(self, status: CallStatus = "ok", error: str | None = None) -> None:
        """Record the call's end; return once it is durable. Only the first end counts; cancellation does not undo it.

        An `ok` call ends as `error` if its answer has an error, as `cancelled` if the agent left, or as `incomplete`
        if its response goes on in the background.
        """
        if self._committed is None:
            if (in_answer := self._transcript.error if self._transcript else None) is not None:
                status, error = "error" if status == "ok" else status, in_answer
            elif self.reply.agent_left and status == "ok":
                status, error = "cancelled", "the agent disconnected; the answer was finished for the record"
            elif status == "ok" and self._transcript is not None and is_under_way(self._transcript.response()):
                status = "incomplete"
            self._committed = asyncio.create_task(self._commit(status, error))
        await asyncio.shield(self._committed)

    async def failed(self, error: BaseException) -> None:
        """Record the failure. Unless it is a cancellation, send it to the agent, or leave a begun answer unfinished."""
        status: CallStatus = "error"
        if not isinstance(error, Exception):
            status, why, limit_s = "cancelled", "the agent disconnected", self.gateway.finish_s
            if self.reply.agent_left and limit_s:
                why += f"; the answer was not finished within {limit_s:g} s"
            error = LightningError(f"{why}, or the proxy was stopped")
        elif isinstance(error, TimeoutError):
            seconds = self.route.upstream.total_timeout_s
            error = UpstreamTimeout(f"{self.upstream} sent no complete answer within {seconds} s")
        elif not isinstance(error, LightningError):
            log.error("call %s: internal error", self._start.call_id, exc_info=error)
            error = LightningError("internal error of the proxy; see its log")
        if not self.reply.started and status == "error":
            self._http_status = error.status
        try:  # a cancelled call's end is recorded after its start, even if that is still on its way
            if not isinstance(error, StoreUnavailable):
                await self.record_end(status, error.message)
        except StoreUnavailable as unavailable:
            error = unavailable
            log.warning("call %s: %s", self._start.call_id, error.message)
        if status == "cancelled":
            return
        if not self.reply.started:
            await self.reply.error(error, self._headers())
            return
        log.warning("call %s: the answer was interrupted: %s", self._start.call_id, error.message)
        if self._transcript is not None and not self._transcript.ended:
            await self.reply.body(self._transcript.end())

    def _end(self, status: CallStatus, error: str | None) -> tuple[CallEnd, list[Statement]]:
        """How the call ended, and the statements that let later requests find it."""
        question, attempts = self.question, self.attempts
        target, route = attempts.target, attempts.target.route
        sent = target.sent if target.translated else self._start.request
        end = end_of(self._start, self._transcript, status, error, sent=sent, version=route.version)
        if end.untrainable_reason == NO_TOKEN_IDS and self.decision.reason:
            end = end._replace(untrainable_reason=self.decision.reason)
        if question.headers.get("x-recording", "").lower() == "only":
            end = end._replace(untrainable_reason=ONLY_RECORDED)
        if attempts.fell_back:
            end = end._replace(fallback=route.upstream.name, model=model_of(target.sent))
        end = end._replace(http_status=self._http_status, ttft_ms=self._ttft_ms, latency_ms=self._elapsed_ms())
        known = self.conversation
        return end, [] if known is None else end_statements(self._start, known, end)

    async def _commit(self, status: CallStatus, error: str | None) -> None:
        """Record the end and notify listeners. A large request or answer is handled in threads."""
        question, gateway = self.question, self.gateway
        size = len(question.request.body) + (self._transcript.size if self._transcript else 0)
        end, also = await in_thread_if_large(size, partial(self._end, status, error))
        if question.recorded:
            recorder = gateway.recorder
            await (recorder.end(end, also) if size < LARGE else await recorder.end_large(end, also))
        try:
            if self._exact:
                self._exact.ended(end)
            if self.decision.chat and gateway.chat_route:
                gateway.chat_route.answered(self._start, end)
            sent, limiter = len(question.request.body), question.limiter
            gateway.ended(self._start, end, question.headers, limiter, sent, recorded=question.recorded)
        except Exception:  # the record is there, and the agent shall have its answer
            log.exception("call %s: processing its end failed", end.call_id)

    def _head(self, answer: Answer, *, keep_length: bool = False) -> list[Header]:
        return [*answer.headers(keep_length=keep_length), *self._headers()]

    def _headers(self) -> Iterator[Header]:
        """Our own headers. A fallback's answer has no policy version."""
        if self.question.recorded:
            yield b"x-rollout-id", self._start.rollout.rollout_id.encode()
            yield b"x-call-id", self._start.call_id.encode()
        if self.route.version is not None and not self.attempts.fell_back:
            yield b"x-policy-version", str(self.route.version).encode()

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000


def end_of(
    start: CallStart,
    transcript: Transcript | BufferedTranscript | None,
    status: CallStatus,
    error: str | None,
    *,
    sent: dict[str, Any],
    version: int | None,
) -> CallEnd:
    """Return how a call ended. `sent`: the request that the model got. `version`: None if the policy did not answer."""
    unkept = transcript and transcript.unkept
    response, tokens = (transcript.response(), transcript.tokens) if transcript and not unkept else (None, Tokens())
    reason = NOT_THE_POLICY if status == "ok" and version is None else None
    return CallEnd(
        call_id=start.call_id,
        rollout_id=start.rollout.rollout_id,
        status=status,
        response=response,
        http_status=None,
        prompt_token_ids=tokens.prompt_token_ids,
        choices=tokens.choices,
        usage=tokens.usage,
        tool_calls=tool_calls(response),
        error=error,
        untrainable_reason=reason or (status == "ok" and unkept) or tokens.untrainable_reason(status, sent),
    )
