"""One recorded call: sent upstream, relayed to the agent, its record always ahead of the answer's last byte."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ..apis.dialects import Dialect
from ..apis.stream import Transcript
from ..apis.tokens import NOT_THE_POLICY, Tokens
from ..apis.tools import tool_calls
from ..errors import LightningError, StoreUnavailable, UpstreamTimeout, UpstreamUnreachable
from ..json_text import encode_as_vllm, loads
from ..types import CallEnd, CallStart, CallStatus
from ..upstreams.attempts import Attempts
from .asgi import Agent
from .ports import Answer, Recorder

log = logging.getLogger(__name__)
OnEnd = Callable[[CallEnd], None]


class Exchange:
    """Runs once. However it ends, a call whose start became durable gets an end: ok, error or cancelled."""

    def __init__(
        self,
        attempts: Attempts,
        recorder: Recorder,
        agent: Agent,
        start: CallStart,
        dialect: Dialect,
        on_end: OnEnd | None = None,
    ) -> None:
        self._attempts = attempts
        self._recorder = recorder
        self._agent = agent
        self._start = start
        self._dialect = dialect
        self._on_end = on_end
        self._began = time.perf_counter()
        self._ttft_ms: float | None = None
        self._http_status: int | None = None
        self._transcript: Transcript | None = None
        self._limit: asyncio.Timeout | None = None
        self._ending: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Relay until the answer is complete; where the agent leaves early or we are cancelled, record that."""
        seconds = self._attempts.target.route.upstream.total_timeout_s
        try:
            await self._recorder.start(self._start)
            async with nullcontext() if seconds is None else asyncio.timeout(seconds) as self._limit:
                await self._relay()
        except TimeoutError:
            await self._failed(UpstreamTimeout(f"upstream {self._upstream}: no whole answer within {seconds} s"))
        except asyncio.CancelledError:
            await self._cancelled()
            raise
        except LightningError as error:
            await self._failed(error)
        except Exception:
            log.exception("call %s: internal error", self._start.call_id)
            await self._failed(LightningError("internal error of the proxy; its log says more"))

    async def _relay(self) -> None:
        answer = await self._attempts.open()
        try:
            self._http_status = answer.status
            await (self._relay_stream(answer) if answer.is_stream else self._relay_whole(answer))
        finally:
            answer.release()

    async def _relay_whole(self, answer: Answer) -> None:
        raw = await answer.read()
        body, tokens, error = _parse(raw), Tokens(), None
        if not 200 <= answer.status < 300:
            error = f"the upstream answered {answer.status}"
        elif not isinstance(body, dict):
            error = "the upstream's answer is no JSON object"
        else:
            tokens = self._dialect.tokens(body)
            if (injection := self._attempts.target.injection) and self._dialect.clean(body, injection):
                raw = encode_as_vllm(body)
        self._has_answered()
        await self._end("error" if error else "ok", body, tokens, error)
        await self._agent.answer(answer.status, answer.headers(keep_length=False), raw)

    async def _relay_stream(self, answer: Answer) -> None:
        injection = self._attempts.target.injection
        transcript = self._transcript = Transcript(self._dialect.stream(injection), whole_frames=bool(injection))
        await self._agent.start(answer.status, answer.headers(keep_length=False))
        async for data in answer.chunks():
            if self._ttft_ms is None:
                self._ttft_ms = self._elapsed_ms()
            if self._ending is not None:
                await self._agent.body(data)
                continue
            await self._agent.body(transcript.feed(data))
            if transcript.done is not None:
                await self._end_stream(transcript, transcript.done)
        if self._ending is None:
            await self._agent.body(transcript.end())
            if transcript.done is None and not transcript.may_end:
                raise UpstreamUnreachable(f"upstream {self._upstream}: the stream ended before its last event")
            await self._end_stream(transcript, transcript.done or b"")
        await self._agent.body(b"", more=False)

    async def _end_stream(self, transcript: Transcript, done: bytes) -> None:
        self._has_answered()
        status: CallStatus = "error" if transcript.error else "ok"
        await self._end(status, transcript.response(), transcript.tokens, transcript.error)
        await self._agent.body(done)

    @property
    def _upstream(self) -> str:
        """The name of the one that the call is at, or that answered it."""
        return self._attempts.target.route.upstream.name

    def _has_answered(self) -> None:
        """What comes now is not the upstream's: the commit, and an agent that may be slow to read."""
        if self._limit is not None:
            self._limit.reschedule(None)

    async def _failed(self, error: LightningError) -> None:
        """Record the failure and show it: as an error, or, where the answer has begun, by leaving it unfinished."""
        if not self._agent.started:
            self._http_status = error.status
        try:
            if not isinstance(error, StoreUnavailable):
                await self._end_early("error", error.message)
        except StoreUnavailable as unavailable:
            error = unavailable
        if not self._agent.started:
            await self._agent.error(error)
            return
        log.warning("call %s: answer broken off: %s", self._start.call_id, error.message)
        if self._transcript is not None and self._transcript.done is None:
            await self._agent.body(self._transcript.end())

    async def _cancelled(self) -> None:
        try:  # recorded after the start, even if that is still on its way
            await self._end_early("cancelled", "the agent disconnected, or the proxy was stopped")
        except StoreUnavailable as error:
            log.warning("call %s: %s", self._start.call_id, error.message)

    async def _end_early(self, status: CallStatus, error: str) -> None:
        transcript = self._transcript
        if transcript is None:
            await self._end(status, None, Tokens(), error)
        else:
            await self._end(status, transcript.response(), transcript.tokens, transcript.error or error)

    async def _end(self, status: CallStatus, response: Any, tokens: Tokens, error: str | None) -> None:
        """Return once the end is durable; the first end counts. Not undone by a cancellation."""
        if self._agent.left and status == "ok":
            status, error = "cancelled", "the agent disconnected; its answer was finished for the record"
        if self._ending is None:
            fell_back = self._attempts.fell_back
            end = CallEnd(
                call_id=self._start.call_id,
                rollout_id=self._start.rollout.rollout_id,
                status=status,
                response=response,
                http_status=self._http_status,
                prompt_token_ids=tokens.prompt_token_ids,
                choices=tokens.choices,
                usage=tokens.usage,
                tool_calls=tool_calls(response),
                error=error,
                untrainable_reason=self._untrainable_reason(status, tokens),
                ttft_ms=self._ttft_ms,
                latency_ms=self._elapsed_ms(),
                fallback=self._upstream if fell_back else None,
                model=self._attempts.target.model if fell_back else None,
            )
            self._ending = asyncio.ensure_future(self._recorder.end(end))
            self._ending.add_done_callback(lambda written: self._written(end, written))
        await asyncio.shield(self._ending)

    def _untrainable_reason(self, status: CallStatus, tokens: Tokens) -> str | None:
        if status == "ok" and self._attempts.target.route.version is None:
            return NOT_THE_POLICY
        return tokens.untrainable_reason(status, self._start.request)

    def _written(self, end: CallEnd, written: asyncio.Future[None]) -> None:
        try:
            if self._on_end is not None and not written.cancelled() and written.exception() is None:
                self._on_end(end)
        except Exception:  # the record is there, and the agent shall have its answer
            log.exception("call %s: what follows its end failed", end.call_id)

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000


def _parse(raw: bytes) -> Any:
    """JSON, or else the text as it came; None for nothing."""
    try:
        return loads(raw)
    except ValueError:
        return raw.decode(errors="replace") or None
