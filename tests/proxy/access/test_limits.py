"""Limits of keys, with a clock that is played."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_proxy.core.errors import RateLimited
from lightning_proxy.core.records import CallEnd, Choice
from lightning_proxy.proxy.access.limits import Bucket, Limiter, Limits


class PlayedClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> PlayedClock:
    return PlayedClock()


def ended(usage: dict[str, int] | None = None, ids: tuple[int, ...] = ()) -> CallEnd:
    return CallEnd("c", "r", "ok", None, 200, prompt_token_ids=ids, choices=(Choice(0, ids),), usage=usage)


def enters(limiter: Limiter, times: int = 1) -> int:
    """How many requests of that number are let in, one after the other."""
    let_in = 0
    for _ in range(times):
        with suppress(RateLimited), limiter.counted():
            let_in += 1
    return let_in


def test_a_minutes_requests_may_come_at_once_then_one_at_a_time_and_refused_ones_cost_nothing(
    clock: PlayedClock,
) -> None:
    limiter = Limiter(Limits(requests_per_minute=6), clock)
    assert enters(limiter, 1000) == 6
    with pytest.raises(RateLimited) as refused, limiter.counted():
        pass
    assert dict(refused.value.headers) == {
        b"retry-after": b"10",
        b"retry-after-ms": b"10000",
        b"x-ratelimit-limit-requests": b"6",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"10.000s",
    }
    clock.now += 9.9
    assert enters(limiter) == 0
    clock.now += 0.1
    assert enters(limiter, 2) == 1
    clock.now += 3600
    assert enters(limiter, 10) == 6


def test_tokens_are_counted_when_a_call_has_ended_by_usage_ids_or_bytes(clock: PlayedClock) -> None:
    for end in (
        ended({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}),
        ended({"input_tokens": 100, "output_tokens": 20}),
        ended(None, tuple(range(60))),
    ):
        limiter = Limiter(Limits(tokens_per_minute=60), clock)
        with limiter.counted():
            limiter.spend(end, 0)  # 120, twice a minute's worth
        clock.now += 60.9
        assert enters(limiter) == 0
        clock.now += 0.1
        assert enters(limiter, 5) == 5, "what a request will cost is not known when it comes"
    # An answer without usage counts by its bytes.
    limiter = Limiter(Limits(tokens_per_minute=60), clock)
    limiter.spend(ended(None)._replace(response={"content": "x" * 200}, http_status=200), 280)
    assert enters(limiter) == 0
    clock.now += 70
    assert enters(limiter) == 1


def test_requests_at_once_are_counted_until_they_leave_and_a_keys_own_limits_win(clock: PlayedClock) -> None:
    limiter = Limiter(Limits(concurrent=2), clock)
    with limiter.counted():
        with limiter.counted():
            assert enters(limiter) == 0
        assert enters(limiter, 3) == 3
    assert Limits(requests_per_minute=5) | Limits(9, 10, None) == Limits(5, 10, None)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 500)), max_size=50), st.integers(1, 1000))
def test_a_bucket_never_gives_more_than_it_was_filled_with(steps: list[tuple[float, int]], per_minute: int) -> None:
    now, taken, bucket = 0.0, 0, Bucket(per_minute)
    for seconds, amount in steps:
        now += seconds
        if bucket.wait(now) == 0:
            taken += amount
            assert taken - amount <= per_minute * (1 + now / 60) + 1e-6
        bucket.take(amount if bucket.wait(now) == 0 else 0, now)
        assert bucket.left(now) <= per_minute
