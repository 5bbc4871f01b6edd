"""Telling the proxy what an agent does besides its calls, for the rollout of the scope (`scope.current`).

Each returns once it is recorded, in the order of the calls; in asyncio use `await asyncio.to_thread(emit_…, …)` where
waiting matters. All raise NoRollout, Refused, ProxyUnreachable.
"""

from __future__ import annotations

from typing import Any

from .scope import current


def emit_reward(
    value: float,
    *,
    name: str = "reward",
    call_id: str | None = None,
    final: bool | None = None,
    comment: str | None = None,
    source: str | None = None,
) -> int:
    """Reward the rollout, which ends it unless `final` is False, or one of its calls (`X-Call-Id` of its answer)."""
    return current().reward(value, name=name, call_id=call_id, final=final, comment=comment, source=source)


def emit_state(value: Any, *, name: str | None = None) -> int:
    """The state that the agent is in: that of the actions that it tells of from now on. Any JSON."""
    return current().event("state", value=value, name=name)


def emit_action(name: str, arguments: Any = None, result: Any = None, *, is_error: bool = False) -> int:
    """What the agent did without a model, such as asking a retriever, and what came of it: a tool transition."""
    return current().event("action", name=name, arguments=arguments, result=result, is_error=is_error)


def emit_note(value: Any, *, name: str | None = None) -> int:
    """Anything worth keeping with the rollout. Any JSON."""
    return current().event("note", value=value, name=name)
