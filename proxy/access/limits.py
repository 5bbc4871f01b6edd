"""Limits each key's requests and tokens per minute, its requests at once, and what it sees of the record.

A key made with `--scope own` sees the rollouts that were opened with it, and numbers computed from these alone. It does
not see what the trainer, a gate or an optimisation computed from everybody's rollouts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from ...core.errors import RateLimited
from ...core.json_text import dumps
from ...core.prices import used
from ...core.records import CallEnd, Limits

SECONDS = 60.0
BYTES_A_TOKEN = 4  # of English text


class Bucket:
    """A token bucket: it holds at most one minute's worth and refills evenly.

    A request's cost may be known only at its end, so the bucket may go below zero until it is refilled.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._full_at = -math.inf

    def left(self, now: float) -> float:
        return self.per_minute - max(self._full_at - now, 0.0) * self.per_minute / SECONDS

    def take(self, amount: float, now: float) -> None:
        self._full_at = max(self._full_at, now) + amount * SECONDS / self.per_minute

    def wait(self, now: float) -> float:
        """Return the seconds until the bucket holds a token, or 0 if it holds one now."""
        return max(1.0 - self.left(now), 0.0) * SECONDS / self.per_minute


class Limiter:
    """Counts, in one worker, the requests of a key, and their tokens once the number is known."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._concurrent = limits.concurrent
        self._running = 0
        self._requests = Bucket(limits.requests_per_minute) if limits.requests_per_minute else None
        self._tokens = Bucket(limits.tokens_per_minute) if limits.tokens_per_minute else None

    @contextmanager
    def counted(self, *, answers: bool = True, reads: bool = False) -> Iterator[None]:
        """Count a request for the duration of the block. Raise RateLimited, and count nothing, if a limit is reached.

        `answers`: a model answers it, so it needs tokens. `reads`: it does not count towards `concurrent`.
        """
        now = self._clock()
        if self._concurrent is not None and not reads and self._running >= self._concurrent:
            raise RateLimited(
                f"rate limit reached: at most {self._concurrent} requests at once; try again when one has ended",
                retry_after_s=1.0,
            )
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens if answers else None)):
            if bucket is not None and (wait := bucket.wait(now)) > 0:
                raise RateLimited(
                    f"rate limit reached: at most {bucket.per_minute} {what} a minute; try again in {wait:.1f} s",
                    retry_after_s=wait,
                    headers={
                        f"x-ratelimit-limit-{what}": f"{bucket.per_minute}",
                        f"x-ratelimit-remaining-{what}": f"{max(math.floor(bucket.left(now)), 0)}",
                        f"x-ratelimit-reset-{what}": f"{wait:.3f}s",
                    },
                )
        if self._requests is not None:
            self._requests.take(1, now)
        self._running += not reads
        try:
            yield
        finally:
            self._running -= not reads

    def spend(self, end: CallEnd, request_bytes: int) -> None:
        """Count the tokens of an ended call: from its usage, or else its token ids, or else an estimate."""
        if self._tokens is not None:
            self._tokens.take(_tokens(end, request_bytes), self._clock())


def _tokens(end: CallEnd, request_bytes: int) -> float:
    """The number of tokens in prompt and answer.

    If an answered call has no usage and no token ids, `BYTES_A_TOKEN` bytes count as one token.
    """
    if (counted := used(end.usage)) is not None:
        return counted.input + counted.output
    seen = len(end.prompt_token_ids) + sum(len(choice.token_ids) for choice in end.choices)
    answered = end.response is not None and end.http_status == 200
    return seen or (answered and (request_bytes + len(dumps(end.response))) / BYTES_A_TOKEN)


Kind = Literal["policy", "version", "step", "status"]

# What replaces paths and numbers computed from everybody's rollouts, for a caller who sees only its own, by view.
OF_ALL: Mapping[Kind, dict[str, Any]] = {
    "policy": {"last_step": None, "collapse": None},
    "version": {"path": None, "metrics": {}, "error": None},
    "step": {"checkpoint": None, "metrics": {}},
    "status": {
        **dict.fromkeys(("per_step", "standstill", "uncounted", "collapse", "verified", "recent")),
        "untrainable": {},
        "plugins": [],
    },
}
