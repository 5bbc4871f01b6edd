"""Puts what polling or resuming a response brings into the record of its call, which its own answer did not end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping

from ...core.records import CallEnd, CallStart, CallStatus, RolloutName
from ...core.tokens import NOT_THE_POLICY
from ...core.tools import tool_calls
from ...core.values import is_under_way
from ..access.auth import credentials
from ..access.limits import Limiter
from ..dialects.chat import Injection
from ..dialects.dialects import DIALECTS
from ..dialects.stream import BufferedTranscript, Transcript
from .asgi import Reply
from .call import Gateway
from .unnamed import Conversation, UnnamedRollouts, end_statements
from .upstream import Answer

API = DIALECTS["/v1/responses"]


async def passed_on(answer: Answer, pieces: AsyncIterator[bytes], reply: Reply) -> Transcript | BufferedTranscript:
    """Pass on an answer that is a response, but for its end, which is `held`."""
    transcript: Transcript | BufferedTranscript
    if answer.is_stream:
        transcript = Transcript(API.stream(Injection()))
    else:
        transcript = BufferedTranscript(API, Injection(), answer.status, translated=False)
        transcript.shown = True
    async for piece in pieces:
        await reply.body(transcript.feed(piece))
        if transcript.ended:
            return transcript
    await reply.body(transcript.end())
    return transcript


class Resumed:
    """Ends calls whose responses went on after their answers: with `background: true`, or where a stream broke off."""

    def __init__(self, gateway: Gateway, unnamed: UnnamedRollouts) -> None:
        self._gateway = gateway
        self._unnamed = unnamed
        self._ending: dict[str, asyncio.Future[None]] = {}  # by call

    async def end(
        self,
        call_id: str,
        transcript: Transcript | BufferedTranscript,
        rollout: RolloutName,
        headers: Mapping[str, str],
        limiter: Limiter | None,
    ) -> None:
        """Return when the call's record durably has its response. Two that poll at once write it once."""
        if call_id not in self._ending:
            ending = asyncio.ensure_future(self._end(call_id, transcript, rollout, headers, limiter))
            self._ending[call_id] = ending
            ending.add_done_callback(lambda _: self._ending.pop(call_id))
        await asyncio.shield(self._ending[call_id])

    async def _end(
        self,
        call_id: str,
        transcript: Transcript | BufferedTranscript,
        rollout: RolloutName,
        headers: Mapping[str, str],
        limiter: Limiter | None,
    ) -> None:
        gateway, call = self._gateway, await self._unnamed.call(call_id)
        if not is_under_way(call.response):
            return
        response, tokens, error = transcript.response(), transcript.tokens, transcript.error
        if error is None and response["status"] in ("failed", "cancelled"):
            error = f"the upstream says that the response is {response['status']}"
        status: CallStatus = "ok" if error is None else "error"
        reason = tokens.untrainable_reason(status, call.request)
        start = CallStart(
            call_id=call_id,
            rollout=rollout._replace(rollout_id=call.rollout_id),
            endpoint=call.endpoint,
            model=call.model,
            policy_version=call.policy_version,
            request=call.request,
            started_at=call.started_at,
        )
        end = CallEnd(
            call_id=call_id,
            rollout_id=call.rollout_id,
            status=status,
            response=response,
            http_status=call.http_status,
            choices=tokens.choices,
            usage=tokens.usage,
            tool_calls=tool_calls(response),
            error=error,
            untrainable_reason=NOT_THE_POLICY if status == "ok" and call.policy_version is None else reason,
            ttft_ms=call.ttft_ms,
            latency_ms=(time.time() - call.started_at) * 1000,
        )
        conversation = await asyncio.to_thread(Conversation, call.request)
        gateway.recorder.resume(start)
        also = [] if rollout.named else end_statements(credentials(headers), start, conversation, end)
        await gateway.recorder.end(end, also, counted=call.status != "incomplete")
        if limiter is not None:
            limiter.spend(end, 0)
        gateway.metrics.call_ended(end, True)
        for listener in gateway.listeners:
            listener(start, end, headers)
