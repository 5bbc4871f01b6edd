"""Further tries at an upstream that says: not now."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_random_exponential,
)
from tenacity.wait import wait_base

from ..config.upstreams import UpstreamConfig
from ..gateway.ports import Answer, Upstream
from .http import NoConnection, Request

_RETRIED = frozenset({429, 502, 503, 504, 529})


async def open_with_retries(config: UpstreamConfig, upstream: Upstream, request: Request) -> Answer:
    """`upstream.open`, as often as `retries` says; its last answer or error if none is a good one.

    An answer whose Retry-After asks for more than `retry_wait_s` is the last.
    """
    retrying = AsyncRetrying(
        stop=stop_after_attempt(1 + config.retries),
        wait=_RetryAfter(config.retry_wait_s),
        retry=retry_if_result(
            lambda answer: answer.status in _RETRIED and (_asked_wait(answer) or 0.0) <= config.retry_wait_s
        )
        | retry_if_exception_type(NoConnection),
        before_sleep=_let_go,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    answer: Answer = await retrying(upstream.open, request)
    return answer


class _RetryAfter(wait_base):
    """What the answer's Retry-After says; else 0.5 s, doubling, with jitter."""

    def __init__(self, longest: float) -> None:
        self._else = wait_random_exponential(multiplier=0.5, max=longest)

    def __call__(self, retry_state: RetryCallState) -> float:
        outcome = retry_state.outcome
        asked = None if outcome is None or outcome.failed else _asked_wait(outcome.result())
        return self._else(retry_state) if asked is None else asked


def _asked_wait(answer: Answer) -> float | None:
    """Seconds, of Retry-After as seconds or as a date; None without one that can be read."""
    value = answer.retry_after
    if value.isdecimal():
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _let_go(retry_state: RetryCallState) -> None:
    if retry_state.outcome is not None and not retry_state.outcome.failed:
        retry_state.outcome.result().release()
