"""Reports an agent's states, actions and rewards to the proxy, for the current rollout (`scope.current`).

Each function returns once its event is recorded. In asyncio use `await asyncio.to_thread(emit_…, …)`.
All raise NoRollout, Refused and ProxyUnreachable.
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
    """Reward the rollout, which ends it unless `final` is False, or the call with the `X-Call-Id` of its answer."""
    return current().reward(value, name=name, call_id=call_id, final=final, comment=comment, source=source)


def emit_state(value: Any, *, name: str | None = None) -> int:
    """Record the agent's state, any JSON. It is the state of the actions emitted after it."""
    return current().event("state", value=value, name=name)


def emit_action(name: str, arguments: Any = None, result: Any = None, *, is_error: bool = False) -> int:
    """Record an action without a model, such as a retrieval, and its result. It is a tool transition."""
    return current().event("action", name=name, arguments=arguments, result=result, is_error=is_error)


def emit_note(value: Any, *, name: str | None = None) -> int:
    """Keep any JSON with the rollout."""
    return current().event("note", value=value, name=name)
