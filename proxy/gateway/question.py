"""Defines what is known of a model call when its request has come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..access.limits import Limiter
from ..apis.dialects import Dialect
from ..recording.group_commit import Statement
from ..types import CallStart, RolloutName
from ..upstreams.base import Request


def _nothing(_: CallStart) -> Sequence[Statement]:
    return ()


class Question(NamedTuple):
    """A request for a model's answer: its JSON `body`, and the `name` of its rollout, a new one if unnamed.

    `also` says what is recorded together with the call's start.
    """

    request: Request
    body: dict[str, Any]
    headers: Mapping[str, str]
    dialect: Dialect
    name: RolloutName
    limiter: Limiter | None
    recorded: bool
    also: Callable[[CallStart], Sequence[Statement]] = _nothing

    @property
    def endpoint(self) -> str:
        """Return the name of the API in records."""
        return self.request.path.removeprefix("/v1/")

    @property
    def is_retry(self) -> bool:
        """Return whether the agent's client resends the request automatically; OpenAI's clients count these retries."""
        return self.headers.get("x-stainless-retry-count", "0") != "0"

    @property
    def is_unnamed(self) -> bool:
        """Return whether only the request's conversation tells which rollout it belongs to."""
        return self.recorded and not self.name.named


# Returns what a model is asked in the place of what an agent asked, in this rollout.
Rewrite = Callable[[Question, RolloutName], Awaitable[Question]]


async def as_asked(question: Question, _: RolloutName) -> Question:
    """Return the question as it is."""
    return question
