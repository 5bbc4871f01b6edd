"""Lets a long-lived HTTP client serve many rollouts: each request names the rollout it is made in."""

from __future__ import annotations

from typing import Any

from .scope import scoped


def event_hooks(*, asynchronous: bool = False) -> dict[str, list[Any]]:
    """The hooks for `httpx.Client(event_hooks=…)`, or with `asynchronous` for `httpx.AsyncClient`."""
    return {"request": [_name_later if asynchronous else _name]}


def follow(client: Any) -> Any:
    """Add the hooks to an existing client, once, and return it.

    The client is an `httpx.Client`, an `httpx.AsyncClient`, or an OpenAI or Anthropic client, which holds one.
    """
    http = getattr(client, "_client", client) if not hasattr(client, "event_hooks") else client
    if not hasattr(http, "event_hooks"):
        raise TypeError(
            f"{type(client).__name__} is not and holds no httpx client: send `run.headers` with its requests yourself"
        )
    hook = _name_later if hasattr(http, "aclose") else _name
    hooks = http.event_hooks
    if hook not in hooks["request"]:
        http.event_hooks = hooks | {"request": [*hooks["request"], hook]}
    return client


def _name(request: Any) -> None:
    rollout = scoped()
    for name, value in rollout.headers.items() if rollout else ():
        request.headers.setdefault(name, value)


async def _name_later(request: Any) -> None:
    _name(request)
